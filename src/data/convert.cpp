#include "oxytorch/data/convert.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "data/codecs.h"
#include "data/file.h"
#include "data/for_each_index.h"
#include "data/mds_writer.h"
#include "data/remote_file.h"
#include "oxytorch/data/stage.h"
#include "oxytorch/error.h"
#include "oxytorch/logging.h"
#include "oxytorch/system.h"

namespace oxytorch::data {
namespace {

constexpr std::int64_t kPiece = 64;  // samples that are read at once, by all threads
constexpr const char* kProgressFile = "convert.json";
constexpr std::size_t kUploads = 4;  // at once, each of a shard in memory

void check_convert(const Dataset& dataset, const ConvertOptions& options) {
  OXY_CHECK(options.format.empty() || options.format == "mds" || options.format == "megatron", InvalidArgument,
            "format is '", options.format, "', expected mds or megatron.");
  OXY_CHECK(options.shard_bytes > 0 && options.shard_bytes <= std::int64_t{1} << 31, InvalidArgument, "shard_bytes is ",
            options.shard_bytes, ", expected 1 to 2 GiB.");
  OXY_CHECK(options.shorter_side >= 0, InvalidArgument, "shorter_side is ", options.shorter_side,
            ", expected at least 0.");
  OXY_CHECK(options.threads >= 0, InvalidArgument, "threads is ", options.threads, ", expected at least 0.");
  OXY_CHECK(options.quality >= 1 && options.quality <= 100, InvalidArgument, "quality is ", options.quality,
            ", expected 1 to 100.");
  OXY_CHECK(dataset.size() > 0, InvalidArgument, "the dataset is empty: there is nothing to convert.");
}

bool is_tokens(const Schema& schema) {
  return schema.fields.size() == 1 && schema.fields[0].kind == Kind::Array && schema.fields[0].shape.size() == 1 &&
         schema.fields[0].dtype != DType::F32 && schema.fields[0].dtype != DType::F64;
}

/// Shrinks the images of a sample whose shorter side is longer than asked for. What is pixels alone becomes a PNG where
/// nothing is to be shrunk, so that nothing is lost.
void encode_images(const Schema& schema, Sample& sample, const ConvertOptions& options) {
  for (std::size_t i = 0; i < sample.size(); ++i) {
    if (schema.fields[i].kind != Kind::Image) continue;
    const bool encoded = sample[i].shape.size() != 3, shrinks = options.shorter_side > 0;
    if (encoded && !shrinks) continue;
    if (encoded) {
      const auto header = image_header(sample[i].data.bytes);
      const int shorter = std::min(header.width, header.height);
      if (header.format != ImageFormat::Unknown && shorter <= options.shorter_side) continue;
    }
    Item item;
    item.image = image_of(sample[i], {});
    if (shrinks && std::min(item.image.width(), item.image.height()) > options.shorter_side) {
      PhiloxStream unused(0);
      resize(options.shorter_side)->apply(item, unused);
    }
    const auto& pixels = item.image.pixels();
    sample[i] = own(shrinks ? encode_jpeg(pixels, options.quality) : encode_png(pixels));
  }
}

/// What an index says of the bytes of a shard.
const nlohmann::json& file_of(const nlohmann::json& shard) {
  return shard.at("zip_data").is_null() ? shard.at("raw_data") : shard.at("zip_data");
}

bool is_shard(const nlohmann::json& shard) {
  const auto has_count = [](const nlohmann::json& of, const char* name) {
    return of.is_object() && of.contains(name) && of[name].is_number_unsigned();
  };
  return has_count(shard, "samples") && shard.contains("zip_data") && shard.contains("raw_data") &&
         has_count(file_of(shard), "bytes");
}

class Conversion {
 public:
  Conversion(const Dataset& dataset, const std::string& folder, const ConvertOptions& options)
      : dataset_(dataset),
        folder_(local_path(folder)),
        options_(options),
        threads_(options.threads == 0 ? read_cores().usable : options.threads) {}

  Converted run() {
    std::error_code error;
    if (!is_remote(folder_)) std::filesystem::create_directories(folder_, error);
    OXY_CHECK(!error, Io, folder_, " cannot be made: ", error.message(), ".");
    const bool tokens = options_.format == "megatron" || (options_.format.empty() && is_tokens(dataset_.schema()));
    return tokens ? to_megatron() : to_mds();
  }

 private:
  /// Samples [first, last), read and changed by all threads.
  std::vector<Sample> piece(std::int64_t first, std::int64_t last) {
    std::vector<Sample> samples(static_cast<std::size_t>(last - first));
    for_each_index(samples.size(), static_cast<std::size_t>(threads_), [&](std::size_t index) {
      auto& sample = samples[index];
      sample = dataset_.read(first + static_cast<std::int64_t>(index));
      encode_images(dataset_.schema(), sample, options_);
    });
    return samples;
  }

  Converted to_megatron() {
    OXY_CHECK(is_tokens(dataset_.schema()), InvalidArgument,
              "Megatron's format holds one field of integers in one dimension, and the dataset has ",
              dataset_.schema().fields.size(), " fields. Text is made tokens by oxytorch.data.tokenize.");
    MegatronWriter writer(join(folder_, "tokens"), dataset_.schema().fields[0].dtype);
    for (std::int64_t first = 0; first < dataset_.size(); first += kPiece) {
      const auto last = std::min(first + kPiece, dataset_.size());
      for (const auto& sample : piece(first, last)) writer.add(sample[0].data.bytes);
      if (options_.progress) options_.progress(last);
    }
    return {"megatron", dataset_.size(), writer.finish(), 0};
  }

  /// What must be the same for a conversion to go on.
  [[nodiscard]] nlohmann::json identity() const {
    return {{"dataset", dataset_.fingerprint()},     {"samples", dataset_.size()},
            {"shard_bytes", options_.shard_bytes},   {"compress", options_.compress},
            {"shorter_side", options_.shorter_side}, {"quality", options_.shorter_side == 0 ? 0 : options_.quality}};
  }

  /// The shards that an earlier call wrote.
  nlohmann::json earlier() {
    const auto path = join(folder_, kProgressFile);
    const auto progress = read_if_there(path);
    OXY_CHECK(progress || !read_if_there(join(folder_, "index.json")), InvalidArgument, folder_,
              " holds an MDS dataset already; remove it, or give another folder.");
    if (!progress) return nlohmann::json::array();
    const auto json = nlohmann::json::parse(*progress, nullptr, false);
    OXY_CHECK(json.is_object() && json.contains("identity") && json.contains("shards") && json["shards"].is_array() &&
                  std::all_of(json["shards"].begin(), json["shards"].end(), is_shard),
              InvalidArgument, path, " is damaged; remove the folder to convert anew.");
    OXY_CHECK(json["identity"] == identity(), InvalidState, folder_,
              " holds a conversion that began with another dataset or other options; remove it to convert anew.");
    return json["shards"];
  }

  /// Waits until no more than `most` shards are on their way; each that is written is one that stays.
  void settle(std::size_t most) {
    for (; writing_.size() > most; writing_.pop_front()) {
      shards_.push_back(nlohmann::json::parse(writing_.front().get()));
      write_location(join(folder_, kProgressFile),
                     nlohmann::json{{"identity", identity()}, {"shards", shards_}}.dump());
    }
  }

  /// Writes a shard while the samples of the next one are read.
  void write_aside(MdsShard shard) {
    settle(is_remote(folder_) ? kUploads - 1 : 0);
    const auto number = static_cast<std::int64_t>(shards_.size() + writing_.size());
    writing_.push_back(std::async(std::launch::async, [this, number, shard = std::move(shard)]() mutable {
      return shard.write(folder_, number, options_.compress);
    }));
  }

  Converted to_mds() {
    shards_ = earlier();
    Converted converted{"mds", dataset_.size(), 0, 0};
    for (const auto& shard : shards_) converted.resumed += shard["samples"].get<std::int64_t>();
    auto first = piece(0, 1);
    auto schema = dataset_.schema();
    const auto columns = mds_columns(schema, first[0]);
    MdsShard shard(columns);
    for (std::int64_t begin = converted.resumed; begin < dataset_.size(); begin += kPiece) {
      const auto end = std::min(begin + kPiece, dataset_.size());
      for (const auto& sample : piece(begin, end)) {
        shard.add(schema, sample);
        if (shard.bytes() >= options_.shard_bytes) write_aside(std::exchange(shard, MdsShard(columns)));
      }
      if (options_.progress) options_.progress(end);
    }
    if (shard.samples() > 0) write_aside(std::move(shard));
    settle(0);
    write_location(join(folder_, "index.json"), nlohmann::json{{"version", 2}, {"shards", shards_}}.dump());
    forget_progress();
    for (const auto& each : shards_) {
      converted.bytes += file_of(each)["bytes"].get<std::int64_t>();
    }
    return converted;
  }

  /// The index is there, so that nothing depends on whether it goes.
  void forget_progress() const {
    const auto path = join(folder_, kProgressFile);
    std::error_code ignored;
    if (!is_remote(path)) {
      std::filesystem::remove(path, ignored);
      return;
    }
    try {
      remove_remote(path);
    } catch (const Error& error) {
      log(LogLevel::Warn, std::string("the conversion is whole, and its list of shards stays: ") + error.what(),
          "data");
    }
  }

  const Dataset& dataset_;
  std::string folder_;
  const ConvertOptions& options_;
  int threads_;
  nlohmann::json shards_;                         // what the index says of those that are written
  std::deque<std::future<std::string>> writing_;  // the same of those behind them
};

}  // namespace

Converted convert(const Dataset& dataset, const std::string& folder, const ConvertOptions& options) {
  check_convert(dataset, options);
  return Conversion(dataset, folder, options).run();
}

}  // namespace oxytorch::data
