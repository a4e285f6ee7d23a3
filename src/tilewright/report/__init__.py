"""What is told of something compiled: as facts, as a page.

In: the records of a compilation (kernels, calls, plan, trace). Out: `facts`, plain frozen values that are `taken` from
them once and that JSON keeps (`stored`); a `layout` of the graph, `charts` as numbers, and one `page` that opens
offline. Nothing here decides anything, and nothing runs a model.
"""
