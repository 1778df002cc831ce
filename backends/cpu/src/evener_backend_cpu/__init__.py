"""evener"""
