import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from scripted_cluster import Cluster
from tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, train_tokenizer

from router.daemon import Router
from router.model import ServedModel
from splitserve.core.config import RouterConfig
from splitserve.rpc.channel import open_channel
from splitserve.text.chat import ChatTemplate
from splitserve.text.tokenizer import Tokenizer
from splitserve.v1 import router_pb2_grpc


@pytest.fixture(scope="session")
def served_model() -> ServedModel:
    return ServedModel(
        name="tiny",
        architecture="arch",
        vocab_size=512,
        max_model_len=2048,
        tokenizer=Tokenizer(train_tokenizer(512), {"eos_token": SPECIAL_TOKENS[2]}),
        chat_template=ChatTemplate(CHAT_TEMPLATE),
    )


@pytest.fixture
def config() -> RouterConfig:
    """A test replaces it through `pytest.mark.parametrize` or its own fixture."""
    return RouterConfig(model=Path("unused"), listen="127.0.0.1:0", handover_timeout_s=2.0)


@pytest.fixture
async def cluster(served_model: ServedModel, config: RouterConfig) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        router = Router(config, served_model)
        await router.start()
        stack.push_async_callback(router.stop)
        channel = await stack.enter_async_context(open_channel(router.address))
        yield Cluster(router, stack, router_pb2_grpc.RouterStub(channel))
    # Whatever a test did, nothing of it is left.
    assert router.tracker.idle
    leaked = [task for task in asyncio.all_tasks() if "Course" in repr(task.get_coro())]
    assert not leaked
