# find_package(Oxytorch): targets Oxytorch::core (no torch) and Oxytorch::oxytorch. The same layout serves a prefix and the
# Python package's own folder, so that a wheel is a C++ package too.
include(CMakePackageConfigHelpers)

set(OXYTORCH_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Oxytorch)

# Headers of the layers that know torch; the rest must compile with no torch on the machine.
set(OXYTORCH_TORCH_MODULES accelerator data generators ops optim amp memory model nn tune trainer oxytorch)
file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/include/oxytorch/*.h)
set(core_headers ${PROJECT_BINARY_DIR}/include/oxytorch/version.h)
set(torch_headers "")
foreach(header IN LISTS headers)
  string(REGEX REPLACE "^oxytorch/([^/.]+).*" "\\1" module ${header})
  if(module IN_LIST OXYTORCH_TORCH_MODULES)
    list(APPEND torch_headers ${PROJECT_SOURCE_DIR}/include/${header})
  else()
    list(APPEND core_headers ${PROJECT_SOURCE_DIR}/include/${header})
  endif()
endforeach()

# A file set is what gets installed. The build checks that each header compiles on its own.
target_sources(oxytorch_core PUBLIC FILE_SET headers TYPE HEADERS
  BASE_DIRS ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include FILES ${core_headers})
set_target_properties(oxytorch_core PROPERTIES INSTALL_RPATH "$ORIGIN" VERIFY_INTERFACE_HEADER_SETS ${OXYTORCH_TESTS})
if(OXYTORCH_TORCH)
  target_sources(oxytorch PUBLIC FILE_SET headers TYPE HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${torch_headers})
  # In a wheel torch is the neighbouring package; elsewhere it is the one that this was built against, which a program
  # that uses no symbol of torch itself would not find.
  set_target_properties(oxytorch PROPERTIES
    INSTALL_RPATH "$ORIGIN;$<IF:$<BOOL:${SKBUILD}>,$ORIGIN/../../torch/lib,${Oxytorch_TORCH_LIBRARY_DIR}>")
endif()
if(OXYTORCH_TORCH AND OXYTORCH_TESTS)
  # The same check, with torch's headers precompiled: CMake's own would read them once for each of ours, a
  # twelfth of the build. That a header includes those of torch that it needs is left to tests/layering.
  set(units "")
  foreach(header IN LISTS torch_headers)
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/include ${header})
    set(unit ${PROJECT_BINARY_DIR}/torch_headers_alone/${name}.cpp)
    file(CONFIGURE OUTPUT ${unit} CONTENT "#include <${name}>\n")
    list(APPEND units ${unit})
  endforeach()
  add_library(oxytorch_torch_headers_alone OBJECT ${units})
  target_link_libraries(oxytorch_torch_headers_alone PRIVATE oxytorch_flags oxytorch)
  target_compile_options(oxytorch_torch_headers_alone PRIVATE -O0)
  target_precompile_headers(oxytorch_torch_headers_alone PRIVATE <ATen/core/Tensor.h> <torch/optim/optimizer.h>)
endif()
if(SKBUILD)
  # A wheel holds no links: one file per library.
  foreach(library oxytorch_core oxytorch)
    set_property(TARGET ${library} PROPERTY VERSION)
    set_property(TARGET ${library} PROPERTY SOVERSION)
  endforeach()
endif()

set(parts core)
install(TARGETS oxytorch_core EXPORT OxytorchCore
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET headers DESTINATION include INCLUDES DESTINATION include)
if(OXYTORCH_TORCH)
  list(APPEND parts oxytorch)
  install(TARGETS oxytorch EXPORT OxytorchTorch
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET headers DESTINATION include INCLUDES DESTINATION include)
  install(EXPORT OxytorchTorch NAMESPACE Oxytorch:: FILE OxytorchTorchTargets.cmake
    DESTINATION ${OXYTORCH_CMAKE_DIR})
endif()
install(EXPORT OxytorchCore NAMESPACE Oxytorch:: FILE OxytorchCoreTargets.cmake
  DESTINATION ${OXYTORCH_CMAKE_DIR})

set(torch_hint "${Torch_DIR}")
if(SKBUILD)
  set(torch_hint [[${PACKAGE_PREFIX_DIR}/../torch]])
endif()
configure_package_config_file(cmake/OxytorchConfig.cmake.in ${PROJECT_BINARY_DIR}/OxytorchConfig.cmake
  INSTALL_DESTINATION ${OXYTORCH_CMAKE_DIR} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/OxytorchConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/OxytorchConfig.cmake ${PROJECT_BINARY_DIR}/OxytorchConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/OxytorchBackend.cmake ${PROJECT_SOURCE_DIR}/cmake/OxytorchTorch.cmake
  DESTINATION ${OXYTORCH_CMAKE_DIR})

# The Python package's own files are no part of a prefix for C++: they go into wheels.
if(OXYTORCH_PYTHON)
  set_target_properties(oxytorch_python PROPERTIES INSTALL_RPATH "$ORIGIN/${CMAKE_INSTALL_LIBDIR};$ORIGIN/../torch/lib")
  install(TARGETS oxytorch_python LIBRARY DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
  install(FILES ${OXYTORCH_PACKAGE_DIR}/_build_info.py DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
  # `oxytorch bench step-tail` and its like.
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/race DESTINATION bench COMPONENT python EXCLUDE_FROM_ALL
    FILES_MATCHING PATTERN *.py PATTERN rivals.json PATTERN requirements.txt PATTERN __pycache__ EXCLUDE)
  # `oxytorch demo`.
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples/oxytorch_demo DESTINATION examples COMPONENT python EXCLUDE_FROM_ALL
    FILES_MATCHING PATTERN *.py PATTERN __pycache__ EXCLUDE)
endif()
