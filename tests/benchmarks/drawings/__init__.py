"""The figures that show data: charts.py draws them, svg.py has their shapes and colours."""
