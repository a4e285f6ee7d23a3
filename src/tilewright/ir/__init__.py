"""The forms that a program takes, as frozen values. Nothing here decides, and nothing asks the machine.

`graph` holds ops that are tensor expressions (`tensor`, `expr`, `reduction`); `kernel` groups them; a `form` is one
kernel over loop classes; a `schedule` is every decision about it; a `program` is the tile program that both make.
`sizes` is arithmetic over sizes, `ops` declares each op once. Graphs, forms,
schedules and programs print themselves; graphs and programs have a `verify`, which tests call after each step.
"""
