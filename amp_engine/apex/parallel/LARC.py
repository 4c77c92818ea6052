"""`apex.parallel.LARC`, the module. The attribute of that name of `apex.parallel` is the class."""  # noqa: N999

from amp_engine.optimizers import LARC as LARC
