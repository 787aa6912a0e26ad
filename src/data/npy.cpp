#include <array>
#include <charconv>
#include <optional>

#include "data/byte_reader.h"
#include "data/formats.h"
#include "data/row_dataset.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

constexpr std::string_view kNpyMagic("\x93NUMPY", 6);

struct NpyHeader {
  DType dtype = DType::U8;
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  // of the data
};

/// Reads the Python dictionary of a header: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
class NpyHeaderParser {
 public:
  NpyHeaderParser(std::string_view text, const std::string& location) : text_(text), location_(location) {}

  [[nodiscard]] NpyHeader parse() {
    std::optional<DType> dtype;
    std::optional<bool> fortran_order;
    std::optional<std::vector<std::int64_t>> shape;
    require(accept("{"), "'{'");
    while (!accept("}")) {
      const auto key = quoted();
      require(accept(":"), "':'");
      if (key == "descr") {
        dtype = description();
      } else if (key == "fortran_order") {
        fortran_order = accept("True");
        require(*fortran_order || accept("False"), "True or False");
      } else if (key == "shape") {
        shape = tuple();
      } else {
        require(false, "'descr', 'fortran_order' or 'shape'");
      }
      if (!accept(",")) {
        require(accept("}"), "'}'");
        break;
      }
    }
    skip_space();
    require(at_ == text_.size(), "nothing more");
    require(dtype && fortran_order && shape, "all of 'descr', 'fortran_order' and 'shape'");
    OXY_CHECK(
        !*fortran_order || shape->size() < 2, NotSupported, location_,
        " is in Fortran order, where the values of a sample do not lie together; save numpy.ascontiguousarray(x).");
    return {*dtype, *std::move(shape), 0};
  }

 private:
  void require(bool met, const char* wanted) const {
    OXY_CHECK(met, Io, location_, " is damaged: the header of a .npy file has to have ", wanted, " at its character ",
              at_, ".");
  }
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool accept(std::string_view token) {
    skip_space();
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }
  std::string_view quoted() {
    const bool single = accept("'");
    require(single || accept("\""), "a quote");
    const auto end = text_.find(single ? '\'' : '"', at_);
    require(end != std::string_view::npos, "a closing quote");
    const auto inside = text_.substr(at_, end - at_);
    at_ = end + 1;
    return inside;
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> numbers;
    require(accept("("), "'('");
    while (!accept(")")) {
      std::int64_t number = 0;
      skip_space();
      const auto* const end = text_.data() + text_.size();
      const auto [next, error] = std::from_chars(text_.data() + at_, end, number);
      require(error == std::errc() && number >= 0, "a dimension");
      at_ = static_cast<std::size_t>(next - text_.data());
      accept("L");  // of Python 2
      numbers.push_back(number);
      if (!accept(",")) {
        require(accept(")"), "')'");
        break;
      }
    }
    return numbers;
  }
  DType description() {
    skip_space();
    OXY_CHECK(!text_.substr(at_).starts_with("["), NotSupported, location_,
              " has a structured dtype, which is not supported; save each of its fields as an array of its own.");
    const auto described = quoted();
    OXY_CHECK(described != "|O" && described != "O", NotSupported, location_,
              " holds Python objects. Reading them takes pickle, which can run any code; save an array of numbers.");
    static constexpr std::array<std::pair<std::string_view, DType>, 12> kDTypes = {{{"u1", DType::U8},
                                                                                    {"i1", DType::I8},
                                                                                    {"b1", DType::Bool},
                                                                                    {"u2", DType::U16},
                                                                                    {"i2", DType::I16},
                                                                                    {"u4", DType::U32},
                                                                                    {"i4", DType::I32},
                                                                                    {"u8", DType::U64},
                                                                                    {"i8", DType::I64},
                                                                                    {"f2", DType::F16},
                                                                                    {"f4", DType::F32},
                                                                                    {"f8", DType::F64}}};
    for (const auto& [code, dtype] : kDTypes) {
      if (described.size() != 3 || described.substr(1) != code) continue;
      const bool swapped = described[0] == '>' && size_of(dtype) > 1;
      OXY_CHECK(!swapped, NotSupported, location_, " is big-endian ('", described,
                "'), which is not supported; save x.astype(x.dtype.newbyteorder('<')).");
      if (described[0] == '<' || described[0] == '|' || described[0] == '>') return dtype;
    }
    OXY_CHECK(false, NotSupported, location_, " has dtype '", described,
              "', which is not supported; booleans, integers and floats of up to 64 bits are.");
  }

  std::string_view text_;
  const std::string& location_;
  std::size_t at_ = 0;
};

NpyHeader read_npy_header(const File& file) {
  const auto& location = file.location();
  const auto version = load_number<std::uint8_t>(file.view(6, 2).bytes.data());
  OXY_CHECK(version >= 1 && version <= 3, NotSupported, location, " is of version ", int{version},
            " of the .npy format; 1 to 3 are known.");
  const std::uint64_t prefix = version == 1 ? 10 : 12;
  const auto* const length_at = file.view(8, prefix - 8).bytes.data();
  const auto length = version == 1 ? load_number<std::uint16_t>(length_at) : load_number<std::uint32_t>(length_at);
  const auto text = file.view(prefix, length);
  auto header = NpyHeaderParser(text.text(), location).parse();
  header.offset = prefix + length;
  const auto bytes = array_bytes(header.dtype, header.shape), left = file.size() - header.offset;
  OXY_CHECK(bytes <= left, Io, location, " is truncated or damaged: its array has more than the ", left,
            " bytes that follow the header at offset ", header.offset, ".");
  return header;
}

}  // namespace

std::shared_ptr<const Dataset> open_npy(const std::string& location) {
  const auto locations = record_locations(location, [](std::string_view name) { return name.ends_with(".npy"); });
  Schema schema;
  std::vector<RowFile> files;
  for (const auto& name : locations) {
    auto file = open_file(name);
    const bool magic = file->size() >= kNpyMagic.size() && file->view(0, kNpyMagic.size()).text() == kNpyMagic;
    if (!magic && files.empty() && !name.ends_with(".npy")) return nullptr;
    OXY_CHECK(magic, Io, name, " is no .npy file: it does not begin with \"\\x93NUMPY\".");
    auto header = read_npy_header(*file);
    const std::int64_t rows = header.shape.empty() ? 1 : header.shape.front();
    if (!header.shape.empty()) header.shape.erase(header.shape.begin());
    Schema found{{{"array", Kind::Array, header.dtype, std::move(header.shape)}}};
    OXY_CHECK(files.empty() || found == schema, InvalidArgument, name, " and ", locations.front(),
              " differ in dtype or in the shape of a row, so they are not one dataset.");
    schema = std::move(found);
    files.push_back({std::move(file), rows, {header.offset}});
  }
  if (files.empty()) return nullptr;
  return std::make_shared<RowDataset>("npy", std::move(schema), std::move(files));
}

}  // namespace oxytorch::data
