"""Parsing over HTTP: requests are read (`asked.py`), wait and are parsed together (`batcher.py`), and are answered
(`answers.py`, `app.py`)."""
