"""`import amp_engine.apex.install` at the top of a program: from then on `import apex` finds amp_engine.apex.

With arguments: `from amp_engine.apex import finder; finder.install(replace=True, children=True)`.
"""

from amp_engine.apex import finder

finder.install()
