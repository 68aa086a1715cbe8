"""Columns: values of Python as Arrow arrays, and functions that read them back."""
