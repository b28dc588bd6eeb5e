"""What verl lacks to train on a machine without accelerator: platform, process group, engines, rollout, weight sync."""
