"""Small networks with a named body and head. Any other `nn.Module` works too: these are the papers' own."""

from fedkin.models.zoo import MODELS, ModelEntry, build, default_model

__all__ = ["MODELS", "ModelEntry", "build", "default_model"]
