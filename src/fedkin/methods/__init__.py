"""One file per paper. Importing this package registers all of them: adding a method means adding a file."""

from importlib import import_module
from pkgutil import iter_modules

from fedkin.methods.base import METHODS, Keep, Method, options_of
from fedkin.options import option

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Keep", "Method", "option", "options_of"]
