"""Which kernel, library call or rewrite makes a result wrong: a search by halving over what compiling did.

Three decisions. First, a compilation is one line of *candidates*: that the captured program is understood (its calls),
then for each graph the declarations of its ops, what each phase changed, op by op, and the kernels and calls of its
plan. In state k the first k of them hold; what lies behind is done by torch (before a graph is captured) or by the
interpreter. So state 0 is the program as torch runs it, the last state is what was compiled, and nothing is compiled
twice: a state is a plan over the kernels that are there.

Second, states are made of values, not of phases run again: two graphs before and after a phase share their values, so
that the first ops of the later one and what is missing of the earlier one are a graph that must give the same. A phase
needs no counter of its own, and a defect shows in whatever a phase does.

Third, a state is wrong if its error is nearer to that of what was compiled than to what is allowed (in the logarithm
of the smallest k): the interpreter rounds in its own way, and must not be taken for the defect.

One limit follows from that. A backward pass computes some values again, and a gradient of an extremum compares these
with what the forward pass saved. In a state in which one pass is compiled and the other one interpreted they may differ
in the last bit, and the gradient is NaN without a defect: then the search names the op at which the two part.
"""

from .search import Bisection, Finding, bar, excess
from .states import Suspect

__all__ = ["Bisection", "Finding", "Suspect", "bar", "excess"]
