"""Forms whose loop classes on one side of a product are fewer: several classes become one, with quotient and rest in
their place. In: a form. Out: a form of the same meaning."""
