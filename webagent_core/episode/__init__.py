"""One episode: context, action grammar, runner and the trajectory that comes out of it."""
