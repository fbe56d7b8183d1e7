"""Reports of runs and plans: HTML pages, plots, lists, predicted against measured."""
