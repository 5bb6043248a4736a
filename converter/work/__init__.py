"""How a conversion's work is kept, shared among processes, shown and finished."""
