"""The papers' tables as data, and what it takes to run them again: settings, cells, published numbers.

`published` reads the TOML files in this folder; `plan` says which runs the cells need and how long they take; `runner`
runs them; `verdicts` compares our numbers with the papers'; `result_files` keeps them in `results/`; `markdown`,
`html_page` and `results_page` write them down."""
