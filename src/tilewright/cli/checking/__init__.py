"""`check`: a model's results against float64, beside eager's and its peers', and what makes one wrong.

In: a request and how it is checked. Out: verdicts on the screen and in the JSON file, an exit code, and a program that
shows what was found.
"""
