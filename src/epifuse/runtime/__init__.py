"""Running plans: arguments, caches of prepared calls, launches, compiling in the background, tuning."""
