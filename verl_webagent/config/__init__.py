"""YAML that every recipe on verl builds on; a package, so that hydra finds it by `pkg://verl_webagent.config`."""
