"""What a training run leaves behind: its folder, the learning curve and the trajectory viewer."""
