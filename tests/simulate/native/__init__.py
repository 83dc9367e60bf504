"""The native engine against its Python twin."""
