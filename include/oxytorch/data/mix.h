/// Stages of whole batches: MixUp and CutMix.
#pragma once

#include <memory>
#include <string>

#include "oxytorch/data/loader.h"

namespace oxytorch::data {

/// The columns that are mixed. Images are U8, F32, BF16 or F16, [batch, channels, height, width] or [batch, height,
/// width, channels] with 1 or 3 channels (the first of these that fits), and are changed where they lie. Labels are
/// integers from 0 to classes - 1, [batch], and become F32 [batch, classes]; such a column, of an earlier mix, may be
/// mixed again.
struct MixColumns {
  std::string image = "image";
  std::string label = "label";
};

/// H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018, as torchvision's v2.MixUp: sample i becomes
/// lambda * sample i + (1 - lambda) * sample i - 1, labels too, with one lambda ~ Beta(alpha, alpha) a batch.
OXY_API BatchStagePtr mix_up(double alpha, std::int64_t classes, MixColumns columns = {});
/// S. Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", 2019, as
/// torchvision's v2.CutMix: a box of sample i - 1 is put over sample i; labels by what is left of it.
OXY_API BatchStagePtr cut_mix(double alpha, std::int64_t classes, MixColumns columns = {});

}  // namespace oxytorch::data
