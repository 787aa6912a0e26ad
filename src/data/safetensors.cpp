#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/byte_reader.h"
#include "data/formats.h"
#include "data/row_dataset.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::uint64_t kSafetensorsHeader = 100'000'000;  // more is refused by the format's own library too

struct SafeTensor {
  std::string name;
  DType dtype = DType::U8;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // behind the header
};

std::optional<DType> safetensors_dtype(std::string_view word) {
  static constexpr std::array<std::pair<std::string_view, DType>, 13> kDTypes = {{{"F64", DType::F64},
                                                                                  {"F32", DType::F32},
                                                                                  {"F16", DType::F16},
                                                                                  {"BF16", DType::BF16},
                                                                                  {"I64", DType::I64},
                                                                                  {"I32", DType::I32},
                                                                                  {"I16", DType::I16},
                                                                                  {"I8", DType::I8},
                                                                                  {"U64", DType::U64},
                                                                                  {"U32", DType::U32},
                                                                                  {"U16", DType::U16},
                                                                                  {"U8", DType::U8},
                                                                                  {"BOOL", DType::Bool}}};
  const auto* const found =
      std::find_if(kDTypes.begin(), kDTypes.end(), [&](const auto& d) { return d.first == word; });
  return found == kDTypes.end() ? std::nullopt : std::optional(found->second);
}

SafeTensor parse_safetensor(const std::string& name, const nlohmann::json& entry, const std::string& location) {
  const auto require = [&](bool met, const char* wanted) {
    OXY_CHECK(met, Io, location, " is damaged: in its header tensor '", name, "' must have ", wanted, ".");
  };
  const auto numbers = [](const nlohmann::json& array) {
    return array.is_array() &&
           std::all_of(array.begin(), array.end(), [](const auto& n) { return n.is_number_unsigned(); });
  };
  require(entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string(), "a dtype");
  require(entry.contains("shape") && numbers(entry["shape"]), "a shape of whole numbers");
  require(entry.contains("data_offsets") && numbers(entry["data_offsets"]) && entry["data_offsets"].size() == 2,
          "two data_offsets");
  const auto& word = entry["dtype"].get_ref<const std::string&>();
  const auto dtype = safetensors_dtype(word);
  OXY_CHECK(dtype, NotSupported, location, ": tensor '", name, "' has dtype ", word,
            ", which is not supported; booleans, integers and floats of 16 to 64 bits are.");
  SafeTensor tensor{name, *dtype, {}, entry["data_offsets"][0], entry["data_offsets"][1]};
  // A dimension above int64 becomes negative, and array_bytes() then too many.
  for (const auto& dimension : entry["shape"]) {
    tensor.shape.push_back(static_cast<std::int64_t>(dimension.get<std::uint64_t>()));
  }
  require(tensor.begin <= tensor.end && array_bytes(*dtype, tensor.shape) == tensor.end - tensor.begin,
          "as many bytes between its data_offsets as dtype and shape take");
  return tensor;
}

std::vector<SafeTensor> parse_safetensors(const nlohmann::json& header, std::uint64_t data_bytes,
                                          const std::string& location) {
  std::vector<SafeTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") tensors.push_back(parse_safetensor(name, entry, location));
  }
  std::vector<const SafeTensor*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const SafeTensor* a, const SafeTensor* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::uint64_t end = 0;
  for (const auto* tensor : order) {
    OXY_CHECK(tensor->begin == end, Io, location, " is damaged: tensor '", tensor->name, "' begins at data offset ",
              tensor->begin, ", and the one before it ends at ", end, ".");
    end = tensor->end;
  }
  OXY_CHECK(end == data_bytes, Io, location, " is truncated or damaged: its tensors have ", end, " bytes, and ",
            data_bytes, " follow the header.");
  return tensors;
}

}  // namespace

std::shared_ptr<const Dataset> open_safetensors(const std::string& location) {
  if (is_folder(location) || !exists(location)) return nullptr;
  auto file = open_file(location);
  const bool named = location.ends_with(".safetensors");
  const auto length = file->size() > 8 ? load_number<std::uint64_t>(file->view(0, 8).bytes.data()) : 0;
  const bool plausible = length >= 2 && length <= kSafetensorsHeader && length <= file->size() - 8;
  if (!named && (!plausible || file->view(8, 1).text() != "{")) return nullptr;
  OXY_CHECK(plausible, Io, location, " is truncated or damaged: it has ", file->size(),
            " bytes, and says that its header has ", length, ".");
  const auto header_view = file->view(8, length);
  const auto text = header_view.text();
  const auto header = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (!named && !header.is_object()) return nullptr;
  OXY_CHECK(header.is_object(), Io, location, " is damaged: its header of ", length, " bytes is no JSON object.");
  const auto tensors = parse_safetensors(header, file->size() - 8 - length, location);
  Schema schema;
  RowFile rows{std::move(file), 0, {}};
  for (const auto& tensor : tensors) {
    OXY_CHECK(!tensor.shape.empty(), InvalidArgument, location, ": tensor '", tensor.name,
              "' has no dimensions, so it has no rows that could be samples.");
    OXY_CHECK(tensor.shape[0] == tensors[0].shape[0], InvalidArgument, location, ": tensors '", tensors[0].name,
              "' and '", tensor.name, "' have ", tensors[0].shape[0], " and ", tensor.shape[0],
              " rows; samples are the rows, so all tensors must have as many.");
    schema.fields.push_back({tensor.name, Kind::Array, tensor.dtype, {tensor.shape.begin() + 1, tensor.shape.end()}});
    rows.rows = tensor.shape[0];
    rows.offsets.push_back(8 + length + tensor.begin);
  }
  std::vector<RowFile> files;
  files.push_back(std::move(rows));
  return std::make_shared<RowDataset>("safetensors", std::move(schema), std::move(files));
}

}  // namespace oxytorch::data
