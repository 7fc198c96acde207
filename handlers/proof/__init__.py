"""Whether outputs agree: the rule, and the inputs on which it is asked."""
