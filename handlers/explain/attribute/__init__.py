"""Attribution methods: one output as a function of the inputs → the share of each value."""
