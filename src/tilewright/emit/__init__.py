"""Printing tile programs as source text."""
