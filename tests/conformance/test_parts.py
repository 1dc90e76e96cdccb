"""Epilogues with parts of a row, joins of parts and their layouts, compared with PyTorch running the same lines."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.passes.structure import STRUCTURES
from tests.frontend.sources import function_from

M, N, K = 10, 32, 6

EPILOGUES = {
    "halves": "gate, up = accum.chunk(2, dim=-1); D = F.silu(gate) * up",
    "halves of a sum": "gate, up = (accum + row).chunk(2, dim=-1); D = F.silu(gate) * (up + 1)",
    "halves of operands": "g, u = accum.chunk(2, -1); a, b = row.chunk(2, -1); D = (g + a) * (u + b) + C[:, 16:]",
    "halves and the whole": "gate, up = accum.chunk(2, dim=-1); D = F.silu(gate) * up; P = accum * 2",
    "pairs": "D = F.silu(accum[..., 0::2]) * accum[..., 1::2]",
    "glu": "D = F.glu(accum)",
    "slices": "D = accum[..., :8] + accum[:, 24:] * accum[:, -16:-8]",
    "split": "a, b, c, d = accum.split(8, dim=-1); D = a * b + c * d",
    "sections": "a, b = torch.split(accum, [16, 16], dim=1); D = a * b",
    "unbind": "a, b = accum.unflatten(-1, (2, 16)).unbind(1); D = a - b",
    "unbound from the end": "a, b = (accum + row).unflatten(-1, (2, 16)).unbind(-2); D = F.silu(a) * b",
    "pieces of heads": "x = accum.unflatten(-1, (2, 2, 8)); D = torch.cat((x[..., 1, :], x[..., 0, :]), dim=-1) * 2",
    "viewed as heads": "x = F.silu(accum + row).view(-1, 2, 16); D = x * x.mean(-1, keepdim=True)",
    "viewed by its shape": "x = accum.view(accum.shape[0], 4, 8); D = x.amax(-1); E = x.flatten()",
    "squeezed": "D = accum.logsumexp(-1, keepdim=True).squeeze(-1)",
    "a range of a range": "D = accum[:, 1:31][:, 2:20][:, 3:5]; E = D.sum(-1)",
    "a range of a sum of a range": "D = (accum[:, 2:30] + row[2:30])[:, 3:9]",
    "sections of a section": "q, kv = accum.split([8, 24], -1); k, v = kv.split([8, 16], -1); D = v * 2; E = k",
    "a range of one column": "p, q, r = accum.split([1, 21, 10], -1); D = p * torch.rsqrt((p * p).mean(-1, True) + 1)",
    "reductions of one column": "p, q = accum.split([1, 31], -1); D = p.abs().amax(-1, True); E = p.sum(-1); G = q * 2",
    "reductions of a last column": "p, q, r = accum.split([12, 19, 1], -1); D = r.amax(-1); E = q.mean(-1); P = -r",
    "the sum of a last column": "p, q, r = accum.split([4, 27, 1], -1); D = r.sum(-1)",
    "a range rolled by one": "x, y = accum.split([5, 27], -1); D = torch.roll(x, 1, -1)",
    "columns of a range reversed": "x, y = accum.split([5, 27], -1); D = torch.cat(x.chunk(5, -1)[::-1], 1); E = -y",
    "a column among ranges": "p, q, r = accum.split([4, 1, 27], -1); D = F.silu(q); P = p * 2",
    "a constant like a range": "D = torch.ones_like(accum[:, :5], dtype=torch.int32); E = accum[:, 5:] * 2",
    "an element": "D = accum[:, 3]",
    "a column beside all": "D = accum - accum[:, 3:4]",
    "of a row's sum": "s = accum.sum(dim=0); a, b = s.chunk(2, dim=-1); D = accum; E = a * b",
    "sums of a part": "gate, up = accum.chunk(2, dim=-1); D = F.silu(gate) * up; E = D.sum(dim=-1)",
    "a norm of a part": "h = F.silu(accum[:, :16]) * accum[:, 16:]; D = h / (h.abs().amax(-1, keepdim=True) + 1)",
    "heads": "q = accum.unflatten(-1, (4, 8)); D = q * torch.rsqrt((q * q).mean(-1, keepdim=True) + 1e-6)",
    "rotary by halves": "x = accum.unflatten(-1, (4, 8)); a, b = x.chunk(2, -1); D = x + torch.cat([-b, a], -1) * 0.5",
    "rotary by pairs": "a, b = accum[:, 0::2], accum[:, 1::2]; D = torch.stack([a - 2 * b, b + 2 * a], -1).flatten(1)",
    "halves exchanged": "a, b = accum.chunk(2, dim=-1); D = torch.cat((b, a), dim=-1) * C",
    "halves to pairs": "a, b = accum.chunk(2, -1); D = torch.stack([a, b], dim=-1).view(-1, 32)",
    "pairs to halves": "D = torch.cat([accum[..., 0::2], accum[..., 1::2]], dim=-1) + row",
    "a gate's backward": "g, u = C.chunk(2, -1); d = accum[:, :16]; D = torch.cat([d * u, d * g], dim=-1)",
    "rolled by half": "D = accum * row + accum.roll(16, -1) * 0.5",
    "rolled by a quarter": "D = torch.roll(accum, -8, (1,)) + accum.unflatten(-1, (4, 8)).roll(4, -1).flatten(1)",
    "reversed quarters": "a, b, c, d = accum.chunk(4, -1); D = torch.cat([d, c, b, a], dim=-1)",
    "transposes": "D = accum.T; E = accum.unflatten(-1, (2, -1)).transpose(1, 2) * 2; P = accum.mT * 0.5",
    "squeeze": "D = accum / (1 + accum.abs().sum(-1, keepdim=True).squeeze(-1)[:, None])",
    "items from the end": "D = accum.unbind(-1)[-1] + accum.split(8, -1)[-2][:, 0]",
    "slices of parts": "b, a = accum.chunk(2, -1)[::-1]; x, y = accum.split(8, -1)[2:]; D = b + torch.cat([x, y], 1)",
    "slices of a shape": "n, m = accum.shape[::-1]; (k,) = accum.shape[1:]; D = accum * n - m + accum.shape[:1][0] / k",
    "slices of sections": "D = torch.cat(accum.split([16, 8, 8], -1)[:0:-1], -1) - accum.unbind(-1)[:3][1][:, None]",
    "uneven parts": "q, k, v = (accum * row).split([20, 4, 8], dim=-1); D = q * 2; E = F.silu(k); P = v.T",
    "a range": "D = accum[:, 3:24] * 2",
    "ranges": "q, k = accum.split([20, 12], dim=-1); D = q * 2; P = F.silu(k)",
    "a range of heads": "D = accum.unflatten(-1, (8, 4))[:, 1:4] * 2",
    "heads of ranges": (
        "q, k = (accum + C).split([24, 8], -1); x, y = q.unflatten(-1, (-1, 8)).chunk(2, -1); "
        "D = torch.cat([-y, x], -1).flatten(-2); P = k - k.mean(-1, keepdim=True)"
    ),
    "ranges beside all": "q, k = accum.split([20, 12], dim=-1); D = q.amax(dim=-1); E = k + 1; P = accum.sum(dim=0)",
    "an expression of a head's operand": "h = accum.unflatten(-1, (4, 8)); D = h * (1 + w) - torch.lerp(w, w * w, 0.5)",
    "a view of such an expression": "g = (1 + w)[None]; D = accum.unflatten(-1, (4, 8)) * g - (row * row).view(4, 8)",
    "heads of such an expression": "D = accum.unflatten(-1, (4, 8)) * (C + 1).unflatten(-1, (4, 8)) + w",
    "a join of a part beside a range": "q, k = accum.split([24, 8], -1); D = torch.cat((-k.abs(), k), -1); E = q",
    "the largest of such a join": "q, k = accum.split([24, 8], -1); D = torch.stack((k, k * k), -1).amax(-1); E = q",
    "the sum of such a join": "q, k = accum.split([24, 8], -1); D = torch.cat((k, k + 1), -1).sum(); E = q",
    "one of what was joined": "v = accum[..., :8]; D = torch.cat((-v, v), -1)[..., 8:]",
    "a range beside a range of it": "x = accum[:, :28] * w[:1]; D = x[:, 8:]; E = x",
    "sums of a range beside those of a range of it": "x = accum[:, :28]; D = x.sum(-1); E = x[:, 8:].amax(-1)",
    "sums of rows of a range beside a range of it": "x = accum[:, 2:]; D = x.logsumexp(0); E = x[:, :20]",
    "every second of a range beside a range of it": "x = accum[:, 4:28]; D = x[:, ::2]; E = x[:, :20]",
    "heads of a range beside some of them": (
        "x = accum[:, :28].unflatten(-1, (7, 4)); y = x[:, 2:]; D = y.sum(-1); E = x.sum(-1); P = y"
    ),
    "a vector beside a half's mean": (
        "g, u = accum.chunk(2, -1); h = g * u; r = (h * h).mean(-1, keepdim=True) + 1; "
        "v = row[:16] * r; D = h * (v - row[16:] / r).relu() + C[:, 16:] * (1 + v)"
    ),
    "a vector beside a half's largest": (
        "g, u = accum.chunk(2, -1); s = g.abs().amax(-1, keepdim=True); D = u * torch.where(s > row[:16], s, row[:16])"
    ),
    "a bound of a half": "a, b = accum.chunk(2, -1); D = torch.clamp(a, -row[:16].abs(), row[:16].abs()) * b",
    "a mask of a half": "a, b = accum.chunk(2, -1); D = torch.where(~(row[:16] > 0), a, b * row[16:])",
    "an expression of a range's operand": "D = accum[:, :8] * (w + 1); E = accum[:, 8:] * -row[8:]",
    "an operand of heads": "h = accum.unflatten(-1, (4, 8)); D = C.unflatten(-1, (4, 8)) * h.amax(-1, keepdim=True)",
    "an item of several": "D = accum.chunk(2, -1)[0] + accum.split(16, -1)[1]",
}


def written(lines: str) -> str:
    steps = lines.split("; ")
    outputs = [name for name in ("D", "E", "P") if any(step.startswith(f"{name} = ") for step in steps)]
    operands = [name for name in ("C", "row", "w") if any(re.search(rf"\b{name}\b", step) for step in steps)]
    body = "".join(f"    {step}\n" for step in steps)
    return f"def epilogue({', '.join(['accum', *operands])}):\n{body}    return {', '.join(outputs)}\n"


def inputs(*leading: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    torch.manual_seed(3)
    a, b = torch.randn(*leading, M, K), torch.randn(K, N)
    return a, b, {"C": torch.randn(M, N), "row": torch.randn(N), "w": torch.randn(8)}


@pytest.mark.parametrize("name", EPILOGUES)
def test_beside_torch(name: str) -> None:
    text = written(EPILOGUES[name])
    function = function_from(text, file="user.py", torch=torch, F=F)
    a, b, operands = inputs()
    given = {name: x for name, x in operands.items() if re.search(rf"\b{name}\b", text.split(":")[0])}
    got, want = ef.gemm(a, b, epilogue=function, **given), function(a @ b, **given)
    torch.testing.assert_close(*(tuple(x) if not isinstance(x, torch.Tensor) else (x,) for x in (got, want)))


@pytest.mark.parametrize("columns", [1, 5])
def test_a_join_in_a_range_that_has_no_such_part_is_refused(columns: int) -> None:
    def largest(accum: Any, bound: Any) -> Any:
        first, rest = accum.split([columns, 7], -1)
        both, bounded = torch.stack((rest.amax(1), rest.amin(1)), -1), first + bound
        return both, bounded

    a, b, _ = inputs()
    with pytest.raises(
        ef.errors.UnsupportedError, match=f"do not fit side by side into columns {columns}:{columns + 7}"
    ):
        ef.gemm(a, b[:, : columns + 7], epilogue=largest, bound=1.0)


def test_hopper_names_why_ranges_of_ranges_are_not_one_product() -> None:
    def ranges(accum: Any) -> Any:
        x = accum[:, 64:448]
        some, others = x[:, :320], x[:, 64:]
        return some, others

    a, b = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(512, 64, dtype=torch.bfloat16).mT
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(ranges, {}))
    reasons = {one.reason for one in ef.explain(args, cc=90).refusals if one.kernel.startswith("sm90")}
    assert any(
        "columns 0:320 and 64:384 in a launch each" in reason and "allow_recompute" in reason for reason in reasons
    )


def test_hopper_answers_for_values_joined_to_other_values() -> None:
    def rolled(accum: Any, column: Any) -> Any:
        both = torch.cat((column, accum.abs().amax(-1, keepdim=True)), -1)
        turned = torch.roll(both, 1, -1)
        return turned

    a, b = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 144, dtype=torch.bfloat16)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(rolled, {"column": torch.empty(64, 1)}))
    assert "sm90_gemm" in str(ef.explain(args, cc=90))


def test_halves_beside_a_range_that_does_not_nest() -> None:
    def halves(accum: Any) -> Any:
        product, inner = accum[:, :64] * accum[:, 64:], accum[:, 10:90] * 2
        return product, inner

    a, b = torch.randn(M, K), torch.randn(K, 128)
    torch.testing.assert_close(tuple(ef.gemm(a, b, epilogue=halves)), halves(a @ b))


@pytest.mark.parametrize("step", ["x + x", "torch.sin(x)", "(x + 1)[None][0]"])
def test_long_expressions_of_operands(step: str) -> None:
    """Planning does not recurse into them, and takes no longer if parts of them are shared."""
    lines = "".join(f"    x{i + 1} = {step.replace('x', f'x{i}')}\n" for i in range(60))
    text = f"def epilogue(accum, w):\n    x0 = w * 1e-9\n{lines}    D = accum.view(-1, 4, 8) * x60\n    return D\n"
    function = function_from(text, file="user.py", torch=torch, F=F)
    a, b, operands = inputs()
    torch.testing.assert_close(ef.gemm(a, b, epilogue=function, w=operands["w"]), function(a @ b, operands["w"]))


def test_expressions_that_do_not_meet_are_told_in_their_line() -> None:
    def epilogue(accum: Any, C: Any) -> Any:
        D, E = accum * 2, (C + 1)[:, None] * C
        return D, E

    with pytest.raises(ef.errors.EpilogueTypeError, match=r"test_parts\.py:"):
        ef.gemm(torch.randn(4, 3), torch.randn(3, 4), epilogue=epilogue, C=torch.randn(4, 4))


@pytest.mark.parametrize("leading", [(0,), (2, 0)])
def test_ranges_of_no_rows_have_a_derivative(leading: tuple[int, ...]) -> None:
    def ranges(accum: Any) -> Any:
        q, k = accum.split([96, 32], -1)
        heads, rest = q.unflatten(-1, (-1, 32)), k * 2
        return heads, rest

    weight = torch.randn(128, K, requires_grad=True)
    heads, rest = ef.linear(torch.randn(*leading, K), weight, epilogue=ranges)
    assert (heads.shape, rest.shape) == ((*leading, 3, 32), (*leading, 32))
    (heads.sum() + rest.sum()).backward()
    assert not weight.grad.any()


def test_ranges_whose_sizes_do_not_nest() -> None:
    """Both 64 and 96 columns divide 192, but not each other."""

    def ranges(accum: Any) -> Any:
        q, k, v = accum[:, :96] * 2, accum[:, 96:128].exp(), accum[:, 128:]
        return q, k, v

    a, b = torch.randn(M, K), torch.randn(K, 192)
    torch.testing.assert_close(tuple(ef.gemm(a, b, epilogue=ranges)), ranges(a @ b))


@pytest.mark.parametrize(
    "name", ["halves", "pairs", "heads", "rotary by halves", "halves exchanged", "squeeze", "ranges"]
)
def test_of_a_linear_layer_of_three_dims(name: str) -> None:
    text = written(EPILOGUES[name]).replace("C", "row").replace("(accum, row)", "(accum, row)")
    text = text.replace("[:, None]", "[..., None]")
    function = function_from(text, file="user.py", torch=torch, F=F)
    a, b, operands = inputs(3)
    given = {"row": operands["row"]} if "row" in text else {}
    got, want = ef.linear(a, b.T.contiguous(), epilogue=function, **given), function(a @ b, **given)
    torch.testing.assert_close(*(tuple(x) if not isinstance(x, torch.Tensor) else (x,) for x in (got, want)))


@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative")
@pytest.mark.parametrize("name", [name for name in EPILOGUES if "E = " not in EPILOGUES[name]])
def test_gradients_beside_torch(name: str) -> None:
    text = written(EPILOGUES[name])
    function = function_from(text, file="user.py", torch=torch, F=F)
    a, b, operands = inputs()
    given = {name: x.double() for name, x in operands.items() if re.search(rf"\b{name}\b", text.split(":")[0])}
    leaves = [x.double().requires_grad_() for x in (a, b)] + [x.requires_grad_() for x in given.values()]

    def gradients(outputs: Any) -> list[torch.Tensor]:
        found = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        torch.manual_seed(5)
        return list(torch.autograd.grad(found, leaves, [torch.randn_like(x) for x in found]))

    got = gradients(ef.gemm(leaves[0], leaves[1], epilogue=function, **given))
    torch.testing.assert_close(got, gradients(function(leaves[0] @ leaves[1], **given)))


@pytest.mark.filterwarnings("error:PyTorch runs the derivative")
@pytest.mark.parametrize(
    "name",
    [
        *("halves", "halves of a sum", "halves of operands", "pairs", "glu", "split", "sections", "heads"),
        *("rotary by halves", "an expression of a head's operand", "a mask of a half"),
    ],
)
def test_the_derivative_of_parts_is_fused(name: str) -> None:
    function = function_from(written(EPILOGUES[name]), file="user.py", torch=torch, F=F)
    for m in (10, 7):
        shapes = {"C": (m, N), "row": (N,), "w": (8,)}
        names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
        given = {key: torch.randn(shape) for key, shape in shapes.items() if key in names}
        leaves = [torch.randn(m, K), torch.randn(K, N), *given.values()]
        a, b, *operands = (leaf.requires_grad_() for leaf in leaves)
        given = dict(zip(given, operands, strict=True))
        got = torch.autograd.grad(ef.gemm(a, b, epilogue=function, **given).square().sum(), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(function(a @ b, **given).square().sum(), leaves))


@pytest.mark.parametrize(
    "name",
    [
        *("halves", "halves of operands", "pairs", "heads", "rotary by halves", "glu", "transposes"),
        *("unbound from the end", "pieces of heads", "viewed as heads", "viewed by its shape", "squeezed"),
    ],
)
def test_one_structure_serves_all_rows_of_a_width(name: str) -> None:
    function = function_from(written(EPILOGUES[name]), file="user.py", torch=torch, F=F)
    counts = []
    for m in (10, 7, 130, 33):
        a, b, operands = torch.randn(m, K), torch.randn(K, N), {"C": torch.randn(m, N), "row": torch.randn(N)}
        given = {key: x for key, x in operands.items() if key in EPILOGUES[name]}
        torch.testing.assert_close(ef.gemm(a, b, epilogue=function, **given), function(a @ b, **given))
        counts.append(len(STRUCTURES))
    assert counts[1:] == counts[:-1]


@pytest.mark.parametrize("name", EPILOGUES)
def test_any_number_of_rows_after_another(name: str) -> None:
    """A structure that is used again must not contain an extent of the first problem."""
    function = function_from(written(EPILOGUES[name]), file="user.py", torch=torch, F=F)
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    for m in (10, 7, 33):
        operands = {"C": torch.randn(m, N), "row": torch.randn(N), "w": torch.randn(8)}
        a, b, given = torch.randn(m, K), torch.randn(K, N), {key: operands[key] for key in names}
        got, want = ef.gemm(a, b, epilogue=function, **given), function(a @ b, **given)
        torch.testing.assert_close(*(tuple(x) if not isinstance(x, torch.Tensor) else (x,) for x in (got, want)))


def test_a_part_of_rows_is_refused_whatever_their_number() -> None:
    def summed(accum: Any) -> Any:
        s = accum.sum(dim=-1)
        return s[..., 0:8]

    for m in (8, 9):
        with pytest.raises(ef.errors.EpilogueTypeError, match="not of the rows or batches"):
            ef.gemm(torch.randn(m, K), torch.randn(K, N), epilogue=summed)


ROWS_DECIDE = (
    "C[..., 1][..., 0::4]",
    "(accum + C).mean(-1).unflatten(-1, (2, -1))",
    "(accum + C).flatten(-2, -1).unflatten(-1, (2, -1))",
)


@pytest.mark.parametrize("line", ROWS_DECIDE)
def test_what_rows_decide_is_decided_anew(line: str) -> None:
    """If the last dim was dropped, the last one is that of the rows. If it was merged, it contains rows and columns."""
    function = function_from(f"def epilogue(accum, C):\n    D = {line} * 2.0\n    return D\n", file="user.py")
    for m in (12, 6, 4, 3, 8):
        a, b, C = torch.randn(m, K), torch.randn(K, N), torch.randn(m, N)
        try:
            got = ef.gemm(a, b, epilogue=function, C=C)
        except ef.errors.EpifuseError:
            continue
        torch.testing.assert_close(got, function(a @ b, C))


def test_a_join_by_another_name() -> None:
    glue = torch.cat

    def exchanged(accum: Any) -> Any:
        first, second = accum.chunk(2, -1)
        return glue([second, first], dim=-1)

    a, b, _ = inputs()
    torch.testing.assert_close(ef.gemm(a, b, epilogue=exchanged), exchanged(a @ b))


def test_a_join_without_columns() -> None:
    def function(accum: Any) -> Any:
        x, y = accum.chunk(2, -1)
        return accum + torch.cat([(y > 0).to(torch.int32), x], -1)

    for n in (8, 0, 8):
        a, b = torch.randn(M, K), torch.randn(K, n)
        torch.testing.assert_close(ef.gemm(a, b, epilogue=function), function(a @ b))
    with pytest.raises(ef.errors.EpilogueTypeError, match="do not fit side by side into the 0 columns of accum"):
        ef.gemm(a, b[:, :0], epilogue="def epi(accum): D = torch.stack([accum, -accum]); return D")


def test_hopper_refuses_reductions_of_parts_by_name() -> None:
    """The mean is over columns that are not neighbours: the same column of each head."""
    a, b, D = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((64, 64), (64, N), (64, 8)))
    text = "def epi(accum): D = accum.unflatten(-1, (4, 8)).mean(1); return D"
    function = function_from(text, file="user.py", torch=torch)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(function, D=D))
    (reason,) = {refusal.reason for refusal in ef.explain(args, cc=90).refusals if "sm90" in refusal.kernel}
    assert "reduces a part of an axis that a reshape cut" in str(reason)


EXTENTS = {
    "halves of a shape": "h = accum.shape[-1] // 2; D = torch.cat([-accum[..., h:], accum[..., :h]], -1)",
    "heads by a number": "D = accum.view(accum.shape[0], heads, accum.shape[1] // heads).amax(-1)",
    "sizes of a shape": "m, n = accum.shape; a, b = accum.split([n // 2, n - n // 2], -1); D = a * b + m",
    "a width of a shape": "a, b = torch.split(accum, accum.size(-1) // 2, dim=1); D = a - b",
    "groups of a shape": "D = accum.unflatten(-1, (accum.shape[1] // 4, 4)).sum(-1)",
    "an operand's half": "D = accum[:, : C.shape[-1] // 2] * C[:, C.shape[1] // 2 :]",
}


@pytest.mark.parametrize("name", EXTENTS)
def test_parts_of_extents(name: str) -> None:
    lines = EXTENTS[name].split("; ")
    text = "def epilogue(accum, C):\n" + "".join(f"    {line}\n" for line in lines) + "    return D\n"
    function = function_from(text, file="user.py", torch=torch, heads=4)
    for m, n in ((10, 32), (7, 32), (16, 16), (4, 48)):
        a, b, C = torch.randn(m, K), torch.randn(K, n), torch.randn(m, n)
        torch.testing.assert_close(ef.gemm(a, b, epilogue=function, C=C), function(a @ b, C))
        got = torch.compile(lambda a, b, C: ef.gemm(a, b, epilogue=function, C=C), backend="eager")(a, b, C)
        torch.testing.assert_close(got, function(a @ b, C))


def test_halves_of_a_shape_serve_all_rows() -> None:
    def rotated(accum: Any) -> Any:
        h = accum.shape[-1] // 2
        return accum + torch.cat([-accum[..., h:], accum[..., :h]], -1)

    def leading(accum: Any) -> Any:
        return accum[:, : accum.shape[0]]

    counts = []
    for m in (4, 8, 16):  # `leading` cuts columns by the number of rows, so each number needs its own structure
        a, b = torch.randn(m, K), torch.randn(K, N)
        for function in (rotated, leading):
            torch.testing.assert_close(ef.gemm(a, b, epilogue=function), function(a @ b))
            counts.append(len(STRUCTURES))
    assert counts[2] - counts[1] == counts[4] - counts[3] == 0


@pytest.mark.parametrize(
    "shape", ["-1, 2 * 32", "-1, 3, 32", "4, -1, 8", "-1, 24", "-1", "accum.shape[1], -1", "-1, 0 + 32"]
)
@pytest.mark.parametrize(
    "value",
    ["accum", "accum[:, :16]", "accum.t()", "accum.amax(-1)", "F.glu(accum)", "F.relu(accum.to(torch.float32))"],
)
def test_reshapes_that_rows_decide(value: str, shape: str) -> None:
    """Some views join rows; with few enough rows, a view joins all of them into one."""
    function = function_from(f"def epi(accum): return {value}.reshape({shape}) * 2", torch=torch, F=F)
    for m in (2, 4, 3, 6, 1, 12, 32, 2):
        a, b = torch.randn(m, K), torch.randn(K, N)
        try:
            found = ef.gemm(a, b, epilogue=function)
        except ef.errors.EpifuseError as refused:
            if "cut across an axis" not in str(refused):
                with pytest.raises(RuntimeError):
                    function(a @ b)
        else:
            torch.testing.assert_close(found, function(a @ b))


NAMED = {
    "rows of batches": ("accum.view(accum.shape[0], 4, -1).mean(-1).sum(-1)", 3),
    "columns by rows": ("accum.view(accum.shape[0], -1, accum.sum(-1).shape[-1]).amax(-1).sum(-1)", 0),
    "columns by turned rows": ("accum.view(accum.shape[0], -1, accum.T.shape[-1]).sum(-1)", 0),
    "a part of an operand": ("accum.view(-1, 4, 8) * s[..., :1]", 0),
}
"""Views that split only columns for some numbers of rows, each with the number of batches, 0 for none."""


@pytest.mark.parametrize("name", NAMED)
def test_views_by_what_rows_decide(name: str) -> None:
    value, batches = NAMED[name]
    function = function_from(f"def epi(accum{', s' if 's[' in value else ''}): return {value} * 2")
    for m in (4, 8, 32, 16, 6, 4):
        a, b = torch.randn(*[batches] * (batches > 0), m, K), torch.randn(*[batches] * (batches > 0), K, N)
        given = {"s": torch.randn(m, 1)} if "s[" in value else {}
        try:
            found = ef.gemm(a, b, epilogue=function, **given)
        except ef.errors.EpifuseError as refused:
            if "cut across an axis" not in str(refused):
                with pytest.raises(RuntimeError):
                    function(a @ b, **given)
        else:
            torch.testing.assert_close(found, function(a @ b, **given))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_one_value_stacks_to_a_dim_of_one(dim: int) -> None:
    a, b, _ = inputs()
    text = f"def epilogue(accum):\n    D = torch.stack([accum * 2], dim={dim})\n    return D\n"
    got = ef.gemm(a, b, epilogue=function_from(text, file="user.py", torch=torch))
    torch.testing.assert_close(got, torch.stack([a @ b * 2], dim=dim))


@pytest.mark.parametrize("name", sorted(set(EPILOGUES) - {"transposes"}))
def test_without_rows(name: str) -> None:
    text = written(EPILOGUES[name])
    function = function_from(text, file="user.py", torch=torch, F=F)
    a, b, operands = inputs()
    operands["C"] = operands["C"][:0]
    given = {name: x for name, x in operands.items() if re.search(rf"\b{name}\b", text.split(":")[0])}
    got, want = ef.gemm(a[:0], b, epilogue=function, **given), function(a[:0] @ b, **given)
    torch.testing.assert_close(*(tuple(x) if not isinstance(x, torch.Tensor) else (x,) for x in (got, want)))


@pytest.mark.parametrize("n", [16, 4096])
def test_an_operand_that_cannot_be_seen_so_is_refused(n: int) -> None:
    """Both kernels of the CPU refuse it. PyTorch runs it if the fallback is allowed."""

    def exchanged(accum: Any, row: Any) -> Any:
        return accum + row.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)

    a, b, row = torch.randn(64, 8), torch.randn(8, n), torch.randn(n)
    with pytest.raises(
        ef.errors.UnsupportedError, match=r"cpu_native, cpu_panel: it cannot reshape 'row' where it lies"
    ):
        ef.gemm(a, b, epilogue=exchanged, row=row)
    with pytest.warns(UserWarning, match="PyTorch runs it unfused"):
        got = ef.gemm(a, b, epilogue=exchanged, row=row, fallback="torch")
    torch.testing.assert_close(got, exchanged(a @ b, row))


def test_a_range_of_what_is_reduced_over_a_range_is_refused() -> None:
    def epilogue(accum: Any) -> Any:
        kv = accum[:, 2:8]
        return (kv - kv.sum(-1, keepdim=True))[:, 1:3]

    with pytest.raises(ef.errors.UnsupportedError, match=r"in columns 2:8: it needs sum over whole rows"):
        ef.gemm(torch.ones(3, 2), torch.ones(2, 9), epilogue=epilogue)


def test_a_part_as_long_as_the_first_rows_is_no_row_later() -> None:
    """First there are 4 heads and 4 rows, and then 7 rows and an operand of 7 heads."""

    def heads(accum: Any, x: Any) -> Any:
        return accum.unflatten(-1, (4, 8)) * x

    ef.gemm(torch.randn(4, K), torch.randn(K, N), epilogue=heads, x=torch.randn(4, 4, 8))
    for shape in ((7, 7, 8), (7, 8)):
        with pytest.raises(ef.errors.EpilogueTypeError, match="does not broadcast"):
            ef.gemm(torch.randn(7, K), torch.randn(K, N), epilogue=heads, x=torch.randn(shape))


def test_an_operand_of_heads_is_refused_where_nothing_has_some() -> None:
    """The structure would serve every N, but the operand fits only one."""

    def summed(accum: Any, x: Any) -> Any:
        D, E = accum * 2, x.sum(-1)
        return D, E

    with pytest.raises(ef.errors.EpilogueTypeError, match="does not broadcast"):
        ef.gemm(torch.randn(M, K), torch.randn(K, N), epilogue=summed, x=torch.randn(M, 4, 8))
