"""formulaic's parser of model formulas, with a power of kvik's own."""

from formulaic.errors import FormulaSyntaxError
from formulaic.parser import DefaultFormulaParser, DefaultOperatorResolver
from formulaic.parser.types import Operator, OrderedSet, Term

__all__ = ["PARSER", "FormulaSyntaxError"]

_POWERS = ("^", "**")


class _Operators(DefaultOperatorResolver):  # type: ignore[misc]  # it is not typed
    """formulaic's, with a power that takes one factor after the other: its own goes through all products."""

    @property
    def operators(self) -> list[Operator]:
        """All of them."""
        others = [one for one in super().operators if one.symbol not in _POWERS]
        own = {"arity": 2, "precedence": 500, "associativity": "right", "to_terms": _power}
        return [*others, *(Operator(symbol, **own) for symbol in _POWERS)]


def _power(terms: OrderedSet[Term], power: OrderedSet[Term]) -> OrderedSet[Term]:
    found = terms
    for _ in range(int(str(next(iter(power)))) - 1):
        found = OrderedSet([*found, *(one * more for one in found for more in terms)])
    return found


PARSER = DefaultFormulaParser(_Operators(), include_intercept=True)
