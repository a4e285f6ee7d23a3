"""The normal form: many ways to write one thing become one.

Identities of scalar expressions (`identities`, as data with their laws), views and shared expressions composed,
frozen weights and masks folded, means and scans of singles that need more digits in doubles.
"""
