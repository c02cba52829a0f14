"""Native kernels compute what torch computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from splitserve import native

pytestmark = pytest.mark.skipif(not native.available, reason="the kernels are not built")

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
RELATIVE = 1e-5


def assert_close(got: Tensor, expected: Tensor, relative: float = RELATIVE) -> None:
    """Relative to the largest: sums of products cancel."""
    error = (got.double() - expected.double()).abs().max()
    assert float(error) <= relative * float(expected.abs().max()), float(error)


@dataclass
class Case:
    """Rows of one token over a cache, and what each sees."""

    cache: Tensor
    query: Tensor
    tables: list[list[int]]
    begins: list[int]
    ends: list[int]
    tokens: list[int]
    layer: int

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def run(self) -> Tensor:
        out = torch.full((self.query.shape[0], self.query.shape[1] * self.query.shape[2]), -7.0)
        out = out.to(self.cache.dtype)
        native.ops.paged_attention(
            out,
            self.query,
            self.cache,
            self.layer,
            *(torch.tensor(each) for each in (self.tokens, self.tables, self.begins, self.ends)),
            self.scale,
        )
        return out

    def expected(self) -> Tensor:
        rows = []
        for token, table, begin, end in zip(
            self.tokens, self.tables, self.begins, self.ends, strict=True
        ):
            kv = self.cache[table, self.layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
            keys, values = kv[:, :, begin:end].double().unbind(0)
            share = self.query.shape[1] // keys.shape[0]
            query = self.query[token].double().view(keys.shape[0], share, -1)
            weights = torch.softmax(query @ keys.transpose(1, 2) * self.scale, -1)
            rows.append((weights @ values).flatten())
        return torch.stack(rows)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 17, 64]))
    kv_heads = draw(st.integers(1, 3))
    share = draw(st.integers(1, 9))
    head_dim = draw(st.sampled_from([16, 32, 48, 64, 80, 128, 256]))
    lengths = draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    window = draw(st.one_of(st.none(), st.integers(1, 300)))
    torch.manual_seed(draw(st.integers(0, 1000)))
    blocks = [-(-length // block_size) for length in lengths]
    ids = torch.randperm(sum(blocks)).tolist()
    tables = [ids[sum(blocks[:row]) :][:count] for row, count in enumerate(blocks)]
    cache = torch.randn(sum(blocks), 2, 2, kv_heads, block_size, head_dim).to(dtype)
    begins = [0 if window is None else max(0, length - window) for length in lengths]
    for table, begin, end in zip(tables, begins, lengths, strict=True):
        # What a row does not see may be anything.
        for place in [*range(begin), *range(end, len(table) * block_size)]:
            cache[table[place // block_size], :, :, :, place % block_size] = float("nan")
    width = max(blocks)
    tokens = torch.randperm(len(lengths)).tolist()
    heads = torch.randn(len(lengths), kv_heads * (share + 2), head_dim).to(dtype)
    return Case(
        cache=cache,
        # A view, as it is in the model: keys and values follow each token's queries.
        query=heads[:, : kv_heads * share],
        tables=[[*table, *[0] * (width - len(table))] for table in tables],
        begins=begins,
        ends=lengths,
        tokens=tokens,
        layer=draw(st.integers(0, 1)),
    )


@SETTINGS
@given(cases(torch.float32))
def test_attention_is_the_softmax_over_the_blocks(case: Case) -> None:
    assert_close(case.run()[case.tokens], case.expected())


@SETTINGS
@given(cases(torch.bfloat16))
def test_attention_to_bfloat16_rounds_only_the_result(case: Case) -> None:
    assert_close(case.run()[case.tokens], case.expected(), 2.0**-8)


@SETTINGS
@given(cases(torch.float32))
def test_attention_of_a_row_is_the_same_bits_in_any_company(case: Case) -> None:
    together = case.run()
    for row, token in enumerate(case.tokens):
        alone = Case(
            case.cache,
            case.query,
            [case.tables[row]],
            [case.begins[row]],
            [case.ends[row]],
            [token],
            case.layer,
        )
        assert torch.equal(alone.run()[token], together[token])


def test_attention_survives_scores_beyond_any_exponential() -> None:
    cache = torch.zeros(1, 1, 2, 1, 4, 16)
    cache[0, 0, 0, 0, :, 0] = torch.tensor([1e4, -1e4, 1e4, 0.0])
    cache[0, 0, 1, 0, :, 0] = torch.tensor([1.0, 5.0, 3.0, 9.0])
    query = torch.zeros(1, 1, 16)
    query[0, 0, 0] = 1e3
    case = Case(cache, query, [[0]], [0], [4], [0], 0)
    assert float(case.run()[0, 0]) == 2.0


@pytest.mark.parametrize(
    ("name", "value"), [("tables", [[1]]), ("tables", [[-1]]), ("tokens", [1]), ("ends", [5])]
)
def test_attention_reads_nothing_outside_the_cache(name: str, value: Any) -> None:
    case = Case(torch.zeros(1, 1, 2, 1, 4, 16), torch.zeros(1, 1, 16), [[0]], [0], [4], [0], 0)
    setattr(case, name, value)
    with pytest.raises(RuntimeError, match="must be"):
        case.run()


@pytest.mark.parametrize(
    ("block", "offset", "layer"), [(2, 0, 0), (-1, 0, 0), (0, 4, 0), (0, 0, 1)]
)
def test_nothing_is_stored_outside_the_cache(block: int, offset: int, layer: int) -> None:
    heads, turn = torch.zeros(1, 3, 16), torch.zeros(1, 16)
    with pytest.raises(RuntimeError, match="must be within"):
        native.ops.rotate_and_store(
            heads,
            turn,
            turn,
            torch.zeros(2, 1, 2, 1, 4, 16),
            layer,
            torch.tensor([block]),
            torch.tensor([offset]),
        )


def rounded(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


@pytest.mark.parametrize("kept_as", [rounded, Tensor.clone])
@SETTINGS
@given(
    rows=st.integers(0, 40),
    outputs=st.integers(1, 150),
    depth=st.one_of(st.integers(1, 60), st.sampled_from([383, 384, 385, 386, 769, 1000])),
    bias=st.booleans(),
    residual=st.booleans(),
)
def test_linear_is_the_product(
    kept_as: Callable[[Tensor], Tensor],
    rows: int,
    outputs: int,
    depth: int,
    bias: bool,
    residual: bool,
) -> None:
    torch.manual_seed(outputs * depth)
    x, weight = torch.randn(rows, depth), kept_as(torch.randn(outputs, depth))
    add = torch.randn(outputs) if bias else None
    other = torch.randn(rows, outputs) if residual else None
    packed = native.ops.pack_linear(weight)
    # Weights that bfloat16 holds stay bfloat16.
    assert packed.dtype is (torch.bfloat16 if kept_as is rounded else torch.float32)
    got = native.ops.linear(x, packed, outputs, add, other)
    expected = functional.linear(x.double(), weight.double(), None if add is None else add.double())
    if rows:
        assert_close(got, expected if other is None else expected + other)
    # The sums are added up in one order, whoever else is there.
    for row in range(0, rows, 7):
        part = None if other is None else other[row : row + 1]
        alone = native.ops.linear(x[row : row + 1], packed, outputs, add, part)
        assert torch.equal(alone[0], got[row])


@pytest.mark.skipif(
    not native.computes(torch.bfloat16), reason="this processor has no tiles of bfloat16"
)
@SETTINGS
@given(
    rows=st.one_of(st.integers(0, 70), st.sampled_from([511, 530])),
    outputs=st.integers(1, 150),
    depth=st.sampled_from([32, 64, 96, 576]),
    bias=st.booleans(),
    residual=st.booleans(),
)
def test_linear_in_bfloat16_rounds_only_the_result(
    rows: int, outputs: int, depth: int, bias: bool, residual: bool
) -> None:
    torch.manual_seed(outputs * depth)
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(outputs, depth).bfloat16()
    add = torch.randn(outputs).bfloat16() if bias else None
    other = torch.randn(rows, outputs).bfloat16() if residual else None
    packed = native.ops.pack_linear(weight)
    got = native.ops.linear(x, packed, outputs, add, other)
    expected = functional.linear(x.double(), weight.double(), None if add is None else add.double())
    if rows:
        assert_close(got, expected if other is None else expected + other, 2.0**-8)
    # The sums are added up in one order, whoever else is there.
    for row in range(0, rows, 7):
        part = None if other is None else other[row : row + 1]
        alone = native.ops.linear(x[row : row + 1], packed, outputs, add, part)
        assert torch.equal(alone[0], got[row])


def rounded_to_bytes(outputs: int, depth: int) -> tuple[Tensor, Tensor]:
    """Numbers of 8 bits, the largest among them, and a scale for each output."""
    values = torch.randint(-127, 128, (outputs, depth), dtype=torch.int8)
    values[:, 0] = torch.tensor([-127, 127])[torch.arange(outputs) % 2]
    return values, torch.rand(outputs) * 0.02


def packed_bytes(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    packed = native.ops.pack_linear(values)
    assert packed.dtype is torch.int8
    columns = packed.shape[0] * packed.shape[2] // 2
    return packed, functional.pad(scales, (0, columns - scales.numel()))


@SETTINGS
@given(
    rows=st.integers(0, 40),
    outputs=st.integers(1, 150),
    depth=st.one_of(st.integers(1, 60), st.sampled_from([383, 384, 385, 386, 769, 1000])),
    bias=st.booleans(),
    residual=st.booleans(),
)
def test_linear_of_8_bits_is_the_product_of_what_they_stand_for(
    rows: int, outputs: int, depth: int, bias: bool, residual: bool
) -> None:
    torch.manual_seed(outputs * depth)
    x, (values, scales) = torch.randn(rows, depth), rounded_to_bytes(outputs, depth)
    add = torch.randn(outputs) if bias else None
    other = torch.randn(rows, outputs) if residual else None
    packed, padded = packed_bytes(values, scales)
    got = native.ops.linear(x, packed, outputs, add, other, padded)
    weight = values.double() * scales.double().unsqueeze(1)
    expected = functional.linear(x.double(), weight, None if add is None else add.double())
    if rows:
        assert_close(got, expected if other is None else expected + other)
    # The sums are added up in one order, whoever else is there.
    for row in range(0, rows, 7):
        part = None if other is None else other[row : row + 1]
        alone = native.ops.linear(x[row : row + 1], packed, outputs, add, part, padded)
        assert torch.equal(alone[0], got[row])


@pytest.mark.skipif(
    not native.computes(torch.bfloat16), reason="this processor has no tiles of bfloat16"
)
@SETTINGS
@given(
    rows=st.one_of(st.integers(0, 70), st.sampled_from([511, 530])),
    outputs=st.integers(1, 150),
    depth=st.sampled_from([32, 64, 96, 576]),
    bias=st.booleans(),
    residual=st.booleans(),
)
def test_tiles_of_8_bits_are_those_of_bfloat16_with_scales(
    rows: int, outputs: int, depth: int, bias: bool, residual: bool
) -> None:
    torch.manual_seed(outputs * depth)
    x, (values, scales) = torch.randn(rows, depth).bfloat16(), rounded_to_bytes(outputs, depth)
    add = torch.randn(outputs).bfloat16() if bias else None
    other = torch.randn(rows, outputs).bfloat16() if residual else None
    packed, padded = packed_bytes(values, scales)
    got = native.ops.linear(x, packed, outputs, add, other, padded)
    weight = values.double() * scales.double().unsqueeze(1)
    expected = functional.linear(x.double(), weight, None if add is None else add.double())
    if rows:
        assert_close(got, expected if other is None else expected + other, 2.0**-8)
    # Where all scales are one, the weights are numbers that bfloat16 holds.
    whole = native.ops.pack_linear(values.bfloat16())
    ones = torch.ones_like(padded)
    assert torch.equal(
        native.ops.linear(x, packed, outputs, add, other, ones),
        native.ops.linear(x, whole, outputs, add, other),
    )
    for row in range(0, rows, 7):
        part = None if other is None else other[row : row + 1]
        alone = native.ops.linear(x[row : row + 1], packed, outputs, add, part, padded)
        assert torch.equal(alone[0], got[row])


def test_scales_belong_to_8_bits_and_cover_whole_panels() -> None:
    x, (values, scales) = torch.randn(2, 8), rounded_to_bytes(5, 8)
    packed, padded = packed_bytes(values, scales)
    for weights, scaling in [
        (packed, None),
        (packed, scales),
        (native.ops.pack_linear(values.float()), padded),
    ]:
        with pytest.raises(RuntimeError, match=r"fit one another|must have"):
            native.ops.linear(x, weights, 5, None, None, scaling)


ELEMENTS = pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, RELATIVE), (torch.bfloat16, 2.0**-8)]
)


@ELEMENTS
@SETTINGS
@given(rows=st.integers(1, 5), width=st.integers(1, 70))
def test_norm_and_gate_are_torchs(
    dtype: torch.dtype, relative: float, rows: int, width: int
) -> None:
    torch.manual_seed(width)
    x, weight = (torch.randn(rows, width) * 3).to(dtype), torch.randn(width)
    got = native.ops.rms_norm(x, weight, 1e-5)
    assert_close(got, functional.rms_norm(x.double(), [width], weight.double(), 1e-5), relative)
    both = (torch.randn(rows, 2 * width) * 20).to(dtype)
    gate, up = both.double().chunk(2, -1)
    assert_close(native.ops.silu_gate(both), functional.silu(gate) * up, relative)


@ELEMENTS
@SETTINGS
@given(head_dim=st.sampled_from([2, 6, 16, 34, 64, 80]), tokens=st.integers(1, 5))
def test_heads_are_rotated_and_filed(
    dtype: torch.dtype, relative: float, head_dim: int, tokens: int
) -> None:
    torch.manual_seed(head_dim)
    heads = torch.randn(tokens, 3 + 2 * 2, head_dim).to(dtype)
    cos, sin = torch.randn(2, tokens, 1, head_dim).to(dtype)
    cache = torch.full((3, 2, 2, 2, 4, head_dim), 7.0, dtype=dtype)
    places = torch.randperm(12)[:tokens]
    before = heads.double()
    native.ops.rotate_and_store(heads, cos, sin, cache, 1, places // 4, places % 4)
    turned = before[:, :5] * cos + before[:, :5].roll(head_dim // 2, -1) * sin
    assert_close(heads[:, :5], turned, relative)
    assert torch.equal(heads[:, 5:], before[:, 5:].to(dtype))
    # Keys and values of each token, and nothing else.
    stored = cache[places // 4, 1, :, :, places % 4]
    assert torch.equal(stored, heads[:, 3:].view(tokens, 2, 2, head_dim))
    assert int((cache != 7.0).any(-1).sum()) == tokens * 4


@SETTINGS
@given(
    width=st.integers(1, 600),
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    scale=st.sampled_from([1.0, 0.1, 30.0, 1e38]),
)
def test_weights_are_summed_up_in_stretches(width: int, rows: list[int], scale: float) -> None:
    torch.manual_seed(width)
    logits, stretch = torch.randn(4, width) * 5, 32
    best = logits[rows].amax(-1)
    scales = torch.full((len(rows),), scale)
    got = native.ops.weight_sums(logits, torch.tensor(rows), best, scales, stretch)
    weights = ((logits[rows].double() - best.double()[:, None]) * scale).exp()
    padded = functional.pad(weights, (0, -width % stretch))
    assert_close(got, padded.view(len(rows), -1, stretch).sum(-1))


def test_more_threads_change_nothing() -> None:
    x, weight = torch.randn(33, 500), torch.randn(900, 500)
    packed = native.ops.pack_linear(weight)
    alone = native.ops.linear(x, packed, 900, None, None)
    torch.set_num_threads(4)
    try:
        assert torch.equal(native.ops.linear(x, packed, 900, None, None), alone)
    finally:
        torch.set_num_threads(1)
