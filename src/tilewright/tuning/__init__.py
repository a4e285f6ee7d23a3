"""Numbers that somebody chose: everywhere else a number is a definition.

In: tables that people read and merge. Out: frozen records. `thresholds` has cross-overs, each with its unit, reason and
source; `search_limits` and `rewrite_limits` what is tried at most; `input_limits` what is refused and what a run may
keep; `text_limits` how much of a text is shown. `<target>.json` are measured blocks of a device, which
`schedule/table` reads.
`tests/test_layers.py` refuses numeric constants of modules elsewhere, but for definitions.
"""
