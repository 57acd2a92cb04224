"""The pure route: init, bind, vjp, make_step, update."""
