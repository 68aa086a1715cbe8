"""The folder of the start hook, and nothing else: it is put in front of ``PYTHONPATH``."""
