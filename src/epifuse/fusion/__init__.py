"""The epilogue language: primitives, activations, reductions, layout. Each name is callable on tensors."""

from epifuse.fusion.vocabulary import VOCABULARY, Entry

__all__ = ["VOCABULARY", "Entry"]
