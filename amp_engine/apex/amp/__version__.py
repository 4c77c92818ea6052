"""`apex.amp.__version__`: a module, as it was. The version is amp_engine's."""

from amp_engine import __version__ as __version__
