"""The callables that users hold: compiled models, functions through Dynamo, exported programs, graph breaks.

In: arguments as a user gives them. Out: results as eager gives them, or an error that names what did not fit.
"""
