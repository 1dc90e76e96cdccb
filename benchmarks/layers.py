"""The products of public models, and random draws of them. The choice of kernels is fitted and judged on these shapes.

N and K are those of the published configurations. Projections that models run as one product, such as Q, K and V or
gate and up, are one product here. `draw(seed, count)` gives the same products on every machine.

    python benchmarks/layers.py COMMIT 150
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Product(NamedTuple):
    """M, N and K of a product in bfloat16, the size of its batch, and the layout of A and B.

    `form` is 'nt' for x @ weight.T, 'nn' for gradient @ weight, 'tn' for gradient.T @ x. `of` names the model.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    form: str = "nt"
    of: str = ""

    @property
    def name(self) -> str:
        """The key of the product in files of results, which `parsed` reads."""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{'' if self.form == 'nt' else self.form + ':'}{batch}{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        """The number of floating-point operations."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """The bytes of A, B and D."""
        return 2 * self.batch * (self.m * self.k + self.n * self.k + self.m * self.n)

    @property
    def is_aligned(self) -> bool:
        """Whether the rows of A and B in memory are multiples of 16 bytes, as TMA needs."""
        rows = {"nt": (self.k,), "nn": (self.k, self.n), "tn": (self.m, self.n)}[self.form]
        return all(row % 8 == 0 for row in rows)


def parsed(text: str) -> Product:
    """The product that a name denotes: [form:][batch x] M x N x K. Raises `ValueError` for other text."""
    form, _, sizes = text.rpartition(":")
    *batch, m, n, k = map(int, sizes.split("x"))
    if form not in ("", "nt", "nn", "tn") or len(batch) > 1:
        raise ValueError(text)
    return Product(m, n, k, *(batch or [1]), form or "nt")


Layers = tuple[tuple[int, int], ...]
"""N and K of each layer of a model."""

TEXT: Mapping[str, Layers] = {
    "Llama 2 7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096)),
    "Llama 2 13B": ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "Llama 2 70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "Llama 3.2 1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "Llama 3.2 3B": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "Llama 3 8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "Llama 3.1 405B": ((18432, 16384), (16384, 16384), (53248, 16384), (16384, 53248)),
    "Qwen2.5 0.5B": ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)),
    "Qwen2.5 1.5B": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)),
    "Qwen2.5 3B": ((2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)),
    "Qwen2.5 7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Qwen2.5 14B": ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "Qwen2.5 32B": ((7168, 5120), (55296, 5120), (5120, 27648)),
    "Qwen2.5 72B": ((10240, 8192), (59136, 8192), (8192, 29568)),
    "Qwen3 0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Qwen3 1.7B": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    "Qwen3 4B": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "Qwen3 8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Qwen3 14B": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
    "Qwen3 32B": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "Qwen3 30B A3B": ((5120, 2048), (2048, 4096), (1536, 2048), (2048, 768)),
    "Mistral 7B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (32000, 4096)),
    "Mistral Nemo": ((6144, 5120), (5120, 4096), (28672, 5120), (5120, 14336), (131072, 5120)),
    "Mistral Small": ((6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768)),
    "Mixtral 8x7B": ((6144, 4096), (14336, 4096), (4096, 14336)),
    "Mixtral 8x22B": ((8192, 6144), (6144, 6144), (16384, 6144), (6144, 16384)),
    "DeepSeek V3": ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    "Gemma 2B": ((2560, 2048), (2048, 2048), (32768, 2048), (2048, 16384), (256000, 2048)),
    "Gemma 7B": ((12288, 3072), (3072, 4096), (49152, 3072), (3072, 24576)),
    "Gemma 2 2B": ((4096, 2304), (2304, 2048), (18432, 2304), (2304, 9216)),
    "Gemma 2 9B": ((8192, 3584), (3584, 4096), (28672, 3584), (3584, 14336)),
    "Gemma 2 27B": ((8192, 4608), (4608, 4096), (73728, 4608), (4608, 36864)),
    "Gemma 3 1B": ((1536, 1152), (1152, 1024), (13824, 1152), (1152, 6912)),
    "Gemma 3 4B": ((4096, 2560), (2560, 2048), (20480, 2560), (2560, 10240)),
    "Gemma 3 12B": ((8192, 3840), (3840, 4096), (30720, 3840), (3840, 15360)),
    "Gemma 3 27B": ((8192, 5376), (5376, 4096), (43008, 5376), (5376, 21504)),
    "Phi-1.5": ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (51200, 2048)),
    "Phi-2": ((7680, 2560), (2560, 2560), (10240, 2560), (2560, 10240)),
    "Phi-3 mini": ((9216, 3072), (3072, 3072), (16384, 3072), (3072, 8192), (32064, 3072)),
    "Phi-4": ((7680, 5120), (5120, 5120), (35840, 5120), (5120, 17920)),
    "GPT-2": ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50257, 768)),
    "GPT-2 medium": ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)),
    "GPT-2 large": ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120)),
    "GPT-2 XL": ((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)),
}
"""Decoders. M is the number of tokens of a step, which is small in decoding."""

ENCODERS: Mapping[str, Layers] = {
    "BERT base": ((2304, 768), (768, 768), (3072, 768), (768, 3072), (30522, 768)),
    "BERT large": ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)),
    "T5 small": ((1536, 512), (512, 512), (2048, 512), (512, 2048), (32128, 512)),
    "T5 base": ((2304, 768), (768, 768), (3072, 768), (768, 3072)),
    "T5 3B": ((12288, 1024), (1024, 4096), (16384, 1024), (1024, 16384)),
    "T5 11B": ((49152, 1024), (1024, 16384), (65536, 1024), (1024, 65536)),
    "Flan-T5 XL": ((6144, 2048), (2048, 2048), (10240, 2048), (2048, 5120)),
    "Flan-T5 XXL": ((12288, 4096), (4096, 4096), (20480, 4096), (4096, 10240)),
    "CLIP text": ((1536, 512), (512, 512), (2048, 512), (512, 2048)),
}
"""Encoders. M is a number of sequences times one of `LENGTHS`."""
LENGTHS = (77, 128, 197, 256, 384, 512)

VISION: Mapping[str, tuple[int, Layers]] = {
    "ViT S/16": (197, ((1152, 384), (384, 384), (1536, 384), (384, 1536))),
    "ViT B/16": (197, ((2304, 768), (768, 768), (3072, 768), (768, 3072))),
    "ViT L/16": (197, ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))),
    "ViT H/14": (257, ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120))),
    "ViT g/14": (257, ((4224, 1408), (1408, 1408), (6144, 1408), (1408, 6144))),
    "ViT G/14": (257, ((4992, 1664), (1664, 1664), (8192, 1664), (1664, 8192))),
    "CLIP ViT B/32": (50, ((2304, 768), (768, 768), (3072, 768), (768, 3072))),
    "CLIP ViT L/14": (257, ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))),
    "SigLIP So400m/14": (729, ((3456, 1152), (1152, 1152), (4304, 1152), (1152, 4304))),
    "DINOv2 g/14": (1370, ((4608, 1536), (1536, 1536), (8192, 1536), (1536, 4096))),
    "Swin-T, first": (3136, ((288, 96), (96, 96), (384, 96), (96, 384))),
    "Swin-T, second": (784, ((576, 192), (192, 192), (768, 192), (192, 768))),
    "Swin-T, third": (196, ((1152, 384), (384, 384), (1536, 384), (384, 1536))),
    "Swin-B, fourth": (49, ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))),
    "Whisper large": (1500, ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120))),
}
"""Vision and audio models, with the number of tokens of one image or of one window of sound."""

DIFFUSION: Mapping[str, tuple[int, Layers]] = {
    "Stable Diffusion 1.5, 320": (4096, ((960, 320), (320, 320), (2560, 320), (320, 1280))),
    "Stable Diffusion 1.5, 640": (1024, ((1920, 640), (640, 640), (5120, 640), (640, 2560))),
    "Stable Diffusion 1.5, 1280": (256, ((3840, 1280), (1280, 1280), (10240, 1280), (1280, 5120))),
    "Stable Diffusion 1.5, text": (77, ((320, 768), (640, 768), (1280, 768))),
    "SDXL, 640": (4096, ((1920, 640), (640, 640), (5120, 640), (640, 2560))),
    "SDXL, 1280": (1024, ((3840, 1280), (1280, 1280), (10240, 1280), (1280, 5120))),
    "SDXL, text": (77, ((640, 2048), (1280, 2048))),
    "DiT XL/2 256": (256, ((3456, 1152), (1152, 1152), (4608, 1152), (1152, 4608))),
    "DiT XL/2 512": (1024, ((3456, 1152), (1152, 1152), (4608, 1152), (1152, 4608))),
    "DiT XL/2, modulation": (1, ((6912, 1152),)),
    "Stable Diffusion 3": (4250, ((4608, 1536), (1536, 1536), (6144, 1536), (1536, 6144))),
    "Stable Diffusion 3.5": (4250, ((7296, 2432), (2432, 2432), (9728, 2432), (2432, 9728))),
    "Flux.1, image": (4096, ((9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288))),
    "Flux.1, text": (512, ((9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288))),
    "Flux.1, both": (4608, ((21504, 3072), (3072, 15360))),
}
"""Diffusion models, with the number of tokens of one image, of one prompt, or of both."""

RECOMMENDERS: Mapping[str, Layers] = {
    "DLRM": ((256, 512), (128, 256), (1024, 1024), (512, 1024), (256, 512)),
    "DLRM DCNv2": ((512, 3456), (3456, 512), (1024, 3456), (1024, 1024), (512, 1024), (256, 512)),
    "Wide & Deep": ((512, 1024), (256, 512)),
    "DeepFM": ((400, 400),),
}
"""Recommenders. M is the number of samples of a batch."""

BATCHES: Mapping[str, tuple[Product, ...]] = {
    "BERT base, attention": (
        Product(128, 128, 64, 384, "nt"),
        Product(512, 512, 64, 96, "nt"),
        Product(128, 64, 128, 384, "nn"),
        Product(512, 64, 512, 96, "nn"),
    ),
    "T5 3B, attention": (Product(512, 512, 128, 256, "nt"), Product(512, 128, 512, 256, "nn")),
    "Whisper large, cross attention": (Product(448, 1500, 64, 80, "nt"),),
    "Swin-T, attention": (Product(64, 64, 32, 512, "nt"), Product(64, 32, 64, 512, "nn")),
    "DeepSeek V3, absorbed": (
        Product(128, 512, 128, 128, "nn"),
        Product(128, 128, 512, 128, "nn"),
        Product(16, 512, 128, 128, "nn"),
    ),
    "Mixtral 8x7B, experts": (Product(256, 14336, 4096, 8, "nt"), Product(1024, 4096, 14336, 8, "nt")),
    "Qwen3 30B A3B, experts": (Product(64, 1536, 2048, 128, "nt"), Product(256, 2048, 768, 128, "nt")),
    "Mamba2, chunks": (Product(256, 256, 128, 512, "nt"), Product(256, 64, 256, 512, "nn")),
    "many small": tuple(Product(side, side, side, 512 * 64 // side, "nn") for side in (64, 128, 256, 512, 1024)),
}


# --- the draw ---------------------------------------------------------------------------------------------------------

MOST_FLOPS = 2.5e12  # 3 to 4 ms on an H100
MOST_BYTES = 8 << 30


def draw(seed: str | int, count: int) -> list[Product]:
    """Draw `count` different products, in the order to measure them. To judge a commit, use its hash as the seed."""
    drawn = random.Random(str(seed))
    found: dict[str, Product] = {}
    while len(found) < count:
        use = drawn.choices([*USES], [weight for weight, _ in USES.values()])[0]
        product = USES[use][1](drawn)
        if product.is_aligned and product.flops <= MOST_FLOPS and product.bytes <= MOST_BYTES:
            found.setdefault(product.name, product._replace(of=f"{use}: {product.of}"))
    return [*found.values()]


def _text(drawn: random.Random) -> Product:
    of, (n, k) = _layer(drawn, TEXT)
    few, even = (1, 2, 4, 8, 16, 32, 64, 128), (256, 512, 1024, 2048, 4096, 8192, 16384)
    m = drawn.choice((drawn.choice(few), drawn.choice(even), _packed(drawn), _packed(drawn)))
    return Product(m, n, k, of=of)


def _packed(drawn: random.Random) -> int:
    """A random number of tokens, as of sequences of different lengths that are packed into one step."""
    return round(2 ** drawn.uniform(8, 14))


def _encoder(drawn: random.Random) -> Product:
    of, (n, k) = _layer(drawn, ENCODERS)
    return Product(drawn.choice(LENGTHS) * drawn.choice((1, 8, 16, 32, 64)), n, k, of=of)


def _images(table: Mapping[str, tuple[int, Layers]], counts: Sequence[int]) -> Callable[[random.Random], Product]:
    def make(drawn: random.Random) -> Product:
        of = drawn.choice([*table])
        tokens, layers = table[of]
        n, k = drawn.choice(layers)
        return Product(tokens * drawn.choice(counts), n, k, of=of)

    return make


def _recommender(drawn: random.Random) -> Product:
    of, (n, k) = _layer(drawn, RECOMMENDERS)
    return Product(drawn.choice((2048, 4096, 6912, 8192, 16384, 32768, 65536)), n, k, of=of)


def _layer(drawn: random.Random, table: Mapping[str, Layers]) -> tuple[str, tuple[int, int]]:
    of = drawn.choice([*table])
    return of, drawn.choice(table[of])


def _forward(drawn: random.Random) -> Product:
    makes = (_text, _encoder, USES["vision"][1], USES["diffusion"][1], _recommender)
    return makes[drawn.choices(range(5), (4, 1, 2, 2, 1))[0]](drawn)


def _input_gradient(drawn: random.Random) -> Product:
    m, n, k, _, _, of = _forward(drawn)
    return Product(m, k, n, form="nn", of=of)


def _weight_gradient(drawn: random.Random) -> Product:
    """A gradient of a weight. K is the number of tokens, which is large in training."""
    m, n, k, _, _, of = _forward(drawn)
    return Product(n, k, max(m, drawn.choice((2048, 4096, 8192, 16384, 32768, 65536))), form="tn", of=of)


def _batch(drawn: random.Random) -> Product:
    of = drawn.choice([*BATCHES])
    return drawn.choice(BATCHES[of])._replace(of=of)


USES: Mapping[str, tuple[float, Callable[[random.Random], Product]]] = {
    "text": (0.38, _text),
    "encoder": (0.07, _encoder),
    "vision": (0.11, _images(VISION, (1, 8, 16, 32, 64, 128))),
    "diffusion": (0.12, _images(DIFFUSION, (1, 2, 4, 8))),
    "recommender": (0.06, _recommender),
    "input gradient": (0.07, _input_gradient),
    "weight gradient": (0.12, _weight_gradient),
    "batch": (0.07, _batch),
}
"""The uses of products: the share of the draws that each gets, and the function that draws a product of it."""

if __name__ == "__main__":
    for each in draw(sys.argv[1], int(sys.argv[2])):
        print(f"{each.name:32} {each.flops:.2g} {each.of}")
