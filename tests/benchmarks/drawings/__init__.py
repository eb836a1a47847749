"""The figures of the pages, one module for each chapter; svg.py has what they share."""
