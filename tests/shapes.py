"""How signatures are checked in the tests: shapes and types by beartype, where an int is also a float (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
