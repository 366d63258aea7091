"""One file per paper, or a folder for a large one: its algorithm in `method`, what may be set in `options`, and in
`ablations` what only tables of results need. Importing this package registers all: adding a method means adding a file.
"""

from importlib import import_module
from pkgutil import iter_modules

from fedkin.methods.base import METHODS, Keep, Method, given_options, options_of
from fedkin.options import option

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
METHODS.sort()

__all__ = ["METHODS", "Keep", "Method", "given_options", "option", "options_of"]
