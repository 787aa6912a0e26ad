# Compiler settings and the functions by which each module joins the build.
include(GNUInstallDirs)
# All that is installed for C++ also goes into the wheel, where libraries are in lib/ whatever the machine's habit is.
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME wheel)
if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# A compiler without a shared C++ library of its own links its static one. Beside the shared one that torch brings into the
# process, that would be two, and streams would take one's locale to the other.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so OUTPUT_VARIABLE own OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT IS_ABSOLUTE "${own}")
    find_library(OXYTORCH_CXX_LIBRARY NAMES libstdc++.so libstdc++.so.6)
    if(NOT OXYTORCH_CXX_LIBRARY)
      message(FATAL_ERROR "${CMAKE_CXX_COMPILER} has no libstdc++.so and would link its static one, which does not work beside "
        "torch's. Install one, or name it with -DOXYTORCH_CXX_LIBRARY=/path/to/libstdc++.so.6.")
    endif()
    message(STATUS "${CMAKE_CXX_COMPILER} has no libstdc++.so: ${OXYTORCH_CXX_LIBRARY} is linked")
    link_libraries("${OXYTORCH_CXX_LIBRARY}")
  endif()
endif()

# LibTorch takes 10 to 20 s a unit: cache the compiler where ccache is installed. The sloppiness lets it serve
# units that use the precompiled header.
find_program(OXYTORCH_CCACHE ccache)
if(OXYTORCH_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${OXYTORCH_CCACHE})
endif()

# A unit that includes torch/torch.h takes the compiler 14 s before the first line of its own, or 6 s with the header
# precompiled; several sources compiled as one unit pay that once.
option(OXYTORCH_UNITY "Compile several sources as one unit; OFF makes the build after a change of one source shorter" ON)

# oxytorch_unity(<target> <sources a unit> [HEADER]): the header is what most sources include, precompiled where each is a unit.
function(oxytorch_unity target size)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${OXYTORCH_UNITY} UNITY_BUILD_BATCH_SIZE ${size})
  if(ARGC GREATER 2 AND NOT OXYTORCH_UNITY)
    target_precompile_headers(${target} PRIVATE ${ARGV2})
  endif()
endfunction()

# A development build lands beside the Python sources, so that PYTHONPATH=python is all it takes. That of another torch and
# a sanitizer's, which are not to be imported by mistake, land beside links to these.
set(OXYTORCH_PACKAGE_DIR "${PROJECT_SOURCE_DIR}/python/oxytorch")
if(SKBUILD)
  set(OXYTORCH_PACKAGE_DIR "${PROJECT_BINARY_DIR}/package")
elseif(OXYTORCH_SANITIZE OR OXYTORCH_PACKAGE_IN_BUILD)
  set(OXYTORCH_PACKAGE_DIR "${PROJECT_BINARY_DIR}/python/oxytorch")
endif()

add_library(oxytorch_flags INTERFACE)
target_compile_options(oxytorch_flags INTERFACE
  -Wall -Wextra -Wpedantic -Wno-unused-parameter
  # Fused multiply-add is written where it is meant; contraction elsewhere would make bits depend on the compiler.
  -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # The second warns of classes with members of an unnamed namespace in any file but a unit's first. The third lets the
  # compiler hold 1 GiB before it looks for memory to reuse, which takes it a fifth of its time in a unit with torch; such
  # a unit then takes 2.2 to 2.8 GB instead of 1.7 to 2.4.
  target_compile_options(oxytorch_flags INTERFACE -fpch-preprocess -Wno-subobject-linkage --param=ggc-min-heapsize=1048576)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 warns of overlap in "text" + std::string&& (its bug 105651).
    target_compile_options(oxytorch_flags INTERFACE -Wno-restrict)
  endif()
endif()
if(OXYTORCH_SANITIZE)
  target_compile_options(oxytorch_flags INTERFACE -fsanitize=${OXYTORCH_SANITIZE} -fno-omit-frame-pointer -g)
  target_link_options(oxytorch_flags INTERFACE -fsanitize=${OXYTORCH_SANITIZE})
endif()
if(OXYTORCH_COVERAGE)
  target_compile_options(oxytorch_flags INTERFACE --coverage -O0 -g)
  target_link_options(oxytorch_flags INTERFACE --coverage)
endif()

# oxytorch_module(<core|torch> FILE...): add a module's sources to the torch-free or to the torch library.
function(oxytorch_module layer)
  if(layer STREQUAL "torch" AND NOT OXYTORCH_TORCH)
    return()
  endif()
  if(layer STREQUAL "core")
    set(target oxytorch_core)
  elseif(layer STREQUAL "torch")
    set(target oxytorch)
  else()
    message(FATAL_ERROR "oxytorch_module: layer is 'core' or 'torch', not '${layer}'")
  endif()
  foreach(file IN LISTS ARGN)
    target_sources(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
  endforeach()
endfunction()

# oxytorch_test_headers(<target>): compile what is only tested as quickly as can be. Most of its time goes into torch and
# the library, and most of its compiler's into optimization and torch/torch.h: 11 s, or 4 s precompiled.
function(oxytorch_test_headers target)
  if(NOT TARGET oxytorch_test_headers)
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/test_headers.cpp CONTENT "int main() {}\n")
    add_executable(oxytorch_test_headers EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/test_headers.cpp)
    target_link_libraries(oxytorch_test_headers PRIVATE oxytorch_flags GTest::gtest GTest::gmock oxytorch OpenMP::OpenMP_CXX)
    target_compile_options(oxytorch_test_headers PRIVATE -O0)
    target_precompile_headers(oxytorch_test_headers PRIVATE <torch/torch.h> <gtest/gtest.h> <gmock/gmock.h>)
  endif()
  target_link_libraries(${target} PRIVATE oxytorch_flags OpenMP::OpenMP_CXX)
  # The compiler takes a precompiled header only where all macros are the same: GoogleTest brings one.
  target_compile_options(${target} PRIVATE -O0 $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_OPTIONS>)
  target_precompile_headers(${target} REUSE_FROM oxytorch_test_headers)
endfunction()

# oxytorch_test(<name> <core|torch> FILE... [INTERNAL] [DEVICES DEVICE...]): a GoogleTest program named <name>; on the CPU
# one ctest entry per test, of the torch layer per suite, and one for the whole program on each device
# (tests/device/torch_device.h). INTERNAL: it includes headers of src/.
function(oxytorch_test name layer)
  if(layer STREQUAL "torch" AND NOT OXYTORCH_TORCH)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 2 test INTERNAL "" DEVICES)
  add_executable(${name} ${test_UNPARSED_ARGUMENTS})
  if(test_INTERNAL)
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  endif()
  target_link_libraries(${name} PRIVATE oxytorch_flags GTest::gtest GTest::gmock GTest::gtest_main)
  if(layer STREQUAL "torch")
    target_link_libraries(${name} PRIVATE oxytorch oxytorch_torch_device OpenMP::OpenMP_CXX)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:oxytorch_test_vector_math>)
    oxytorch_unity(${name} 8)
    oxytorch_test_headers(${name})
  else()
    target_link_libraries(${name} PRIVATE oxytorch_core)
    oxytorch_unity(${name} 8)
    target_compile_options(${name} PRIVATE -O1)
  endif()
  get_filename_component(module ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  if(layer STREQUAL "torch")
    set(reports ${PROJECT_BINARY_DIR}/test-suites)
    set(entries ${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake)
    file(GENERATE OUTPUT ${entries} CONTENT "include([==[${PROJECT_SOURCE_DIR}/cmake/TestSuites.cmake]==])
test_suites(${name} [==[$<TARGET_FILE:${name}>]==] [==[${reports}]==] [==[${module};${layer}]==])\n")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${entries})
  else()
    include(GoogleTest)
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES
      LABELS "${module};${layer}" ENVIRONMENT OXYTORCH_CACHE=off)
  endif()
  foreach(device IN LISTS test_DEVICES)
    add_test(NAME ${name}.${device} COMMAND ${name})
    set_tests_properties(${name}.${device} PROPERTIES ENVIRONMENT "OXYTORCH_DEVICE=${device};OXYTORCH_CACHE=off"
                                                      LABELS "${module};${layer};device")
    # at::manual_seed of a torch for CUDA throws where the device HPU is registered too; Gaudi's bridge has a torch of its own.
    if(device STREQUAL "hpu" AND EXISTS "${Oxytorch_TORCH_LIBRARY_DIR}/libtorch_cuda.so")
      set_tests_properties(${name}.${device} PROPERTIES DISABLED ON)
    endif()
  endforeach()
endfunction()
