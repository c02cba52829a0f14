"""The serve question, asked of a real cluster."""

import json
import sys
from pathlib import Path

from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2]))  # ``bench`` is not installed.


def test_it_measures_a_router_and_draws_what_it_saw(cluster, tiny_model, tmp_path, monkeypatch):
    import bench.report
    import bench.serve
    from bench.__main__ import main

    monkeypatch.setattr(bench.serve, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(bench.report.Report.write, "__defaults__", (tmp_path,))
    # Objectives that no machine misses and one that none meets.
    for tpot_ms, attainment in ((60_000, 1.0), (1e-6, 0.0)):
        options = {
            "model": tiny_model,
            "router": cluster.address,
            "trace": "short",
            "length-scale": 0.2,
            "request-rate": 10,
            "duration-s": 2,
            "ttft-ms": 60_000,
            "tpot-ms": tpot_ms,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        result = CliRunner().invoke(main, ["serve", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        told = json.loads((tmp_path / "serve-short.json").read_text())
        [point] = told["sides"]["splitserve"]["points"]
        assert point["failed"] == []
        assert point["requests"] == 20
        assert point["attainment"] == attainment
        assert 0 < point["latencies_s"]["TTFT"]["p50"] < 60
        assert f"{attainment:.0%}" in result.output
    plots = {"serve-short-attainment", "serve-short-timeline-10"}
    for name in plots:
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
