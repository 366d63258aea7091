"""The papers' tables as data, and what it takes to run them again: settings, cells, published numbers.

`tables` reads the TOML files beside this one; `plan` says which runs the cells need and how long they take; `reproduce`
runs them; `compare` puts our numbers beside the papers'; `render` writes them down."""
