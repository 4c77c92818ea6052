"""What each process of an architecture would import, imported once: the server of processes imports this."""

import diffusers
import transformers

import tests.clients.torchvision_operators  # noqa: F401  (before what imports torchvision)
import tests.zoo.measure
import tests.zoo.process  # noqa: F401
from tests.zoo.architectures import measured

for _library in (transformers.logging, diffusers.logging):
    _library.set_verbosity_error()
    _library.disable_progress_bar()
for _architecture in ("llama", "vit", "bart"):
    measured(_architecture)
