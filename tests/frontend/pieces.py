"""Pieces of Python, most of them outside the language, that `tests.malformed` puts into every position."""


def _split(text: str) -> tuple[str, ...]:
    return tuple(piece.strip() for line in text.strip().splitlines() for piece in line.split("¦"))


EXPRESSIONS = _split("""
accum @ C ¦ accum << 1 ¦ accum >> 1 ¦ (accum > 0) ^ (C > 0) ¦ accum in (C, C) ¦ accum is C ¦ accum not in row
(t := accum) ¦ lambda x: x ¦ [x for x in (C,)] ¦ {x for x in (C,)} ¦ {x: x for x in (C,)} ¦ (x for x in (C,))
{'a': C} ¦ {C} ¦ (yield C) ¦ (yield from C) ¦ f'{alpha}' ¦ 'text' ¦ b'text' ¦ 1j ¦ ... ¦ None ¦ (accum, C)
[accum, C] ¦ () ¦ [] ¦ torch ¦ torch.nn ¦ torch.relu ¦ math.sqrt ¦ ef ¦ max ¦ torch.float16 ¦ accum.relu ¦ accum.T
accum.shape ¦ accum.shape[0] ¦ accum[0] ¦ accum[:, 0] ¦ accum[C > 0] ¦ accum[()] ¦ accum[:] ¦ accum[...]
accum[None, :, :, :] ¦ alpha[None] ¦ accum[1:] ¦ row[:, None] ¦ undefined ¦ undefined(C) ¦ torch.undefined(C)
ef.undefined(C) ¦ accum.undefined() ¦ accum.undefined ¦ torch.float16.itemsize ¦ alpha.real ¦ 'a'.join('b')
__import__('os') ¦ open('x') ¦ eval('1') ¦ print(C) ¦ len(accum) ¦ range(3) ¦ torch.randn(3)
torch.zeros_like(accum) ¦ torch.tensor(1.0) ¦ exec('') ¦ type(C) ¦ accum and C ¦ accum or C ¦ not accum
accum if C else row ¦ accum < C < row ¦ 0 < accum < 1 ¦ not (C > 0) ¦ accum % C ¦ accum // C ¦ accum & C ¦ ~accum
accum | 1 ¦ ~alpha ¦ -(accum > 0) ¦ +(accum > 0) ¦ (accum > 0) + (C > 0) ¦ (accum > 0) - (C > 0)
(accum > 0) * (C > 0) ¦ (accum > 0) ** 2 ¦ accum ** (C > 0) ¦ alpha / 0 ¦ 1 % 0 ¦ math.sqrt(-1) ¦ math.sqrt(accum)
math.sqrt('a') ¦ math.sqrt() ¦ math.sqrt(1, 2) ¦ math.sqrt(x=1) ¦ math.hypot(3, 4) ¦ math.fsum((1, 2))
math.modf(alpha) ¦ math.gcd(alpha, 2) ¦ 10 ** 400 ¦ 1e400 ¦ 2 ** 31 ¦ -2 ** 31 ¦ 2 ** 63 ¦ 9223372036854775808
accum + 10 ** 400 ¦ ef.index_m(accum) + 2 ** 40 ¦ torch.relu(*accum) ¦ torch.relu(**C) ¦ torch.relu(*(accum,))
accum(C) ¦ alpha() ¦ 'a'(C) ¦ None() ¦ (C, C)() ¦ torch.relu(accum)(C) ¦ epi(accum)
accum + accum.sum(0).sum(0).sum(0) ¦ accum.sum(5) ¦ accum.sum((0, 0)) ¦ accum + row[:, None] ¦ accum + col.sum()
accum + C.sum(1) ¦ accum.amax(1) + accum ¦ accum.permute(1, 0) + C ¦ accum.reshape(7, -1) ¦ accum.reshape(-1, -1)
accum.reshape(0) ¦ accum.permute(0) ¦ accum.permute(0, 0) ¦ accum.max(0) ¦ accum.min(dim=1)
accum.max(1, keepdim=True) ¦ torch.max(accum, 0) ¦ max(accum, C, row) ¦ max() ¦ max(alpha) ¦ sum(alpha) ¦ abs()
round(accum, 2) ¦ pow(accum, 2, 3) ¦ any(alpha) ¦ min(C, dim=7) ¦ max(accum, C, dim=0) ¦ accum.to('cpu')
accum.to() ¦ accum.to(C) ¦ accum.to(torch.complex64) ¦ accum.double() ¦ accum.float(1) ¦ accum.half(C)
accum.long() ¦ accum.item() ¦ accum.add_(1) ¦ accum.relu_() ¦ accum.size() ¦ accum.where(C > 0, row)
(C > 0).where(accum, C) ¦ torch.where(alpha > 0, accum, C) ¦ torch.where(accum, C, C) ¦ torch.where(C > 0)
torch.where(C > 0, 1.0, 2.0) ¦ ef.where(alpha > 0, 1.0, 2.0) ¦ torch.pow(2.0, 3.0)
torch.nn.functional.gelu(accum, 'tanh') ¦ F.gelu(accum, approximate='fast') ¦ F.gelu(accum, approximate=1)
F.leaky_relu(accum, C) ¦ F.softplus(accum, row) ¦ F.prelu(accum, 0.1) ¦ F.elu(accum, alpha=C)
torch.maximum(C, 1) ¦ torch.clamp(accum) ¦ torch.clamp(accum, min=C, max=1.0) ¦ torch.clamp(accum, 'a', 'b')
accum.clamp(1, None) ¦ F.softmax(accum) ¦ F.softmax(accum, dim='a') ¦ F.softmax(accum, dim=C) ¦ accum.softmax()
accum.norm(1) ¦ torch.sum(accum, dim=alpha) ¦ torch.sum(accum, keepdim=1) ¦ torch.sum(accum, -1, None)
torch.mean(C > 0) ¦ ef.debug_print() ¦ ef.debug_print('{', accum) ¦ ef.debug_print(accum)
ef.debug_print('{} {}', C) ¦ ef.index_m(alpha) ¦ ef.index_m(row) ¦ ef.index_n() ¦ ef.index_l(accum, 1)
ef.cast(accum, float) ¦ ef.cast(C) ¦ accum.to(torch.float8_e4m3fn) + 1 ¦ accum.to(torch.uint8) * 2
accum.to(torch.float8_e5m2).sum() ¦ accum == 'a' ¦ accum == None ¦ accum is None ¦ None is None ¦ 'a' == 'b'
torch.float16 == torch.float32 ¦ accum == (C, C)
""")

STATEMENTS = _split("""
if alpha: D = accum ¦ for i in (1,): D = accum ¦ while alpha: D = accum ¦ with torch.no_grad(): D = accum
def g(): pass ¦ class X: pass ¦ async def g(): pass ¦ import os ¦ raise C ¦ from os import * ¦ assert alpha
del C ¦ global C ¦ nonlocal C ¦ accum += 1 ¦ accum[0] = C ¦ accum.x = C ¦ D = accum = C ¦ D: int ¦ C = accum
alpha = 2 ¦ accum = C ¦ [D] = accum ¦ D, = accum ¦ *D, = accum ¦ D, D = accum, C ¦ a, b = accum
(a, (b, c)) = (accum, C) ¦ a, b = helper(accum) ¦ break ¦ continue ¦ return ¦ return accum, accum ¦ return C
return accum + 1, C ¦ return () ¦ return [] ¦ return None ¦ return 1.0 ¦ return 'a' ¦ return alpha
return (accum, C), C ¦ return D ¦ return accum; return accum ¦ yield accum ¦ await accum ¦ accum ¦ accum + C
torch.relu(accum) ¦ 'text' ¦ ... ¦ D = D + 1 ¦ D = accum;; D = 1 ¦ D == accum ¦ D += accum ¦ D = yield
D = *accum ¦ print(accum) ¦ exec('') ¦ D = accum if alpha ¦ D = accum + ¦ D = ¦ True = accum ¦ None = accum
__debug__ = accum ¦ f(x) = accum ¦ D = relu = accum ¦ torch = accum ¦ D = lambda: accum ¦ D = accum.relu(
D = (accum ¦ D = accum) ¦ D := accum ¦ D -> accum ¦ @accum ¦ D = 0x ¦ D = 1_ ¦ D = 'a ¦ D = \uff41ccum + 1 ¦ D = accum$
D = accum? ¦ D = ¬accum
""")
STATEMENTS += (
    "try: D = accum\n    except: pass",
    "(D) = ",
    "match alpha:\n        case 1: pass",
    "\tD = accum",
    "  D = accum",
    "D = accum  # \x00",
)

SIGNATURES = _split("""
x ¦ C ¦ *accum ¦ **accum ¦ *args ¦ accum, *args ¦ accum, **kw ¦ C, accum ¦ *, accum ¦ accum=1 ¦ accum=None
accum, C='a' ¦ accum, C=None ¦ accum, C=(1, 2) ¦ accum, C=torch.relu ¦ accum, accum ¦ accum, C=accum ¦ accum C
accum, D ¦ accum, /, C, *, row ¦ accum, C=1j ¦ accum, C=[] ¦ accum, C, C ¦ accum, *, C='a'
accum: int, C: str = 1
""")
SIGNATURES += ("",)

WRONG = _split("""
'text' ¦ b'text' ¦ None ¦ ... ¦ 1j ¦ True ¦ 3 ¦ -1 ¦ 2.5 ¦ 7 ¦ (accum, C) ¦ (0, 0) ¦ (0, 1) ¦ [0] ¦ () ¦ alpha ¦ C
row ¦ col ¦ (accum > 0) ¦ ef.index_m(accum) ¦ accum.sum() ¦ accum.sum(1) ¦ torch ¦ torch.relu ¦ torch.float16
accum.relu ¦ math.pi ¦ accum.to(torch.float8_e5m2) ¦ accum.permute(1, 0)
""")
