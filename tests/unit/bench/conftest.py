"""``bench`` is run from the checkout and not installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
