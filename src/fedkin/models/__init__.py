"""Small networks with a named body and head. Any other `nn.Module` works too: these are the papers' own."""

from fedkin.models.adapters import adapters, lora, merged
from fedkin.models.own import Given, draw_anew, first_network
from fedkin.models.ready import Ready, Samples
from fedkin.models.registered import MODELS, ModelEntry, begun, build
from fedkin.models.zoo import default_model

__all__ = [
    "MODELS",
    "Given",
    "ModelEntry",
    "Ready",
    "Samples",
    "adapters",
    "begun",
    "build",
    "default_model",
    "draw_anew",
    "first_network",
    "lora",
    "merged",
]
