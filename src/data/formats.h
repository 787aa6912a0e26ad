/// One function a format: whether it is this one, and its reader.
#pragma once

#include <memory>
#include <string>

#include "oxytorch/data/dataset.h"

namespace oxytorch::data {

using OpenFormat = std::shared_ptr<const Dataset> (*)(const std::string& location);

/// Each returns null where the location is not of its format, and throws where it is and is damaged.
OXY_API std::shared_ptr<const Dataset> open_npy(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_megatron(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_safetensors(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_jsonl(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_tfrecord(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_image_folder(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_webdataset(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_mds(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_litdata(const std::string& location);
OXY_API std::shared_ptr<const Dataset> open_beton(const std::string& location);

}  // namespace oxytorch::data
