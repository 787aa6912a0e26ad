/// The exact one-sided sign-flip test on signed ranks.
#pragma once

#include <span>

namespace oxytorch::tune {

/// Probability, over all ways to flip the signs of `differences`, of a sum of the scores of the positive ones at least
/// as large as the one seen. The score of a difference is the rank of its magnitude, and the middle rank for the
/// greater half, so that a few great outliers do not decide. Exact for differences that are symmetric about 0, as those
/// of two equal sides in random order are, whatever their distribution and however they depend on each other through
/// time; ties share their ranks, and zeros count for neither side. A signed-rank test: F. Wilcoxon, "Individual
/// comparisons by ranking methods", 1945; as the scores do not fall with the magnitude, a shift of all differences
/// downwards never lessens the value (T. P. Hettmansperger, J. W. McKean, "Robust nonparametric statistical methods",
/// 2011, 1.8). The enumeration is the convolution of the scores, so that no flips are sampled. O(n^3).
double sign_flip_p_value(std::span<const double> differences);

/// The median of all means of two (J. L. Hodges, E. L. Lehmann, 1963): the shift that this test would call even.
double center_of(std::span<const double> differences);

}  // namespace oxytorch::tune
