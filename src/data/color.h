/// Colours as PIL's ImageEnhance and ImageOps change them, in place and bit for bit.
#pragma once

#include "oxytorch/data/image.h"

namespace oxytorch::data {

// Factor 1 leaves an image as it is, 0 makes it black, gray, of one gray, or smooth.
void adjust_brightness(Pixels& pixels, double factor);
void adjust_saturation(Pixels& pixels, double factor);
void adjust_contrast(Pixels& pixels, double factor);
void adjust_sharpness(Pixels& pixels, double factor);
/// Turns the hue by `turn` of a circle, -0.5 to 0.5.
void adjust_hue(Pixels& pixels, double turn);

/// Keeps the highest `bits` of each value.
void posterize(Pixels& pixels, int bits);
/// Inverts values from `threshold` up.
void solarize(Pixels& pixels, double threshold);
/// Stretches each channel to 0 to 255.
void auto_contrast(Pixels& pixels);
/// Makes each channel's values equally frequent.
void equalize(Pixels& pixels);

}  // namespace oxytorch::data
