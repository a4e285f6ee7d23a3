"""Providers of faster forms of a call. Each is a function that gives its offers for a task; `registry` asks them all.

In: a task with what is frozen of it. Out: offers, each of which packs what there is to pack when it is made. Only here
it is known from which size on a form pays, and what it can do on its result.
"""
