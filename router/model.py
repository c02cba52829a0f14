"""What the router knows of the model: text and tokens, no weights."""

from dataclasses import dataclass
from pathlib import Path

from splitserve.core.config import RouterConfig
from splitserve.model.config import ModelConfig
from splitserve.model.fingerprint import architecture_fingerprint
from splitserve.text.chat import ChatTemplate
from splitserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model all nodes of this router serve.

    Attributes:
        name: For people.
        architecture: The first part of every node's fingerprint.
        vocab_size: Tokens the model has logits for.
        max_model_len: Most tokens of prompt and answer together.
        tokenizer: Text to tokens.
        chat_template: Chats to text.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate

    @classmethod
    def load(cls, config: RouterConfig) -> "ServedModel":
        """Reads what a router needs of the model's directory.

        Raises:
            NotFoundError: A file is missing.
            InvalidArgumentError: A file is corrupt, or the architecture is unknown.
        """
        model = ModelConfig.from_dir(config.model)
        text: Path = config.tokenizer or config.model
        return cls(
            name=model.name,
            architecture=architecture_fingerprint(config.model),
            vocab_size=model.vocab_size,
            max_model_len=model.max_position_embeddings,
            tokenizer=Tokenizer.from_dir(text),
            chat_template=ChatTemplate.from_dir(text),
        )
